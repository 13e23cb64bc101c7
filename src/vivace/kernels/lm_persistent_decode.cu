// A warp without columns: the query and the joining of attention, and the drawn id.
__device__ __forceinline__ void run_helper(const Args& a) {
  Shared& s = shared();
  const int lane = threadIdx.x & 31, b = blockIdx.x, head = b % HEADS, split = b / HEADS;
  u32 epoch = *a.epoch;
  for (int past = a.length[s.rule.slot];; ++past) {
    const Past part = part_of(past, split);
    for (int layer = 0; layer < LAYERS; ++layer) {
      ++epoch;
      if (split < part.splits) help(a, part, head, split, epoch, lane);
    }
    ++epoch;
    if (b != GRID - 1 && lane == 0) {
      u64 word = peek(a.words + WORDS_TOKEN);
      while (!is_new(word, epoch)) word = peek(a.words + WORDS_TOKEN);
      s.next_token = (int)(u32)word;
    }
    bar_sync<4, WITH_HELPER>();
    mark(4);
    if (s.next_token < 0) return;
  }
}

// The warps with columns.
__device__ __forceinline__ void run_workers(const Args& a, int left) {
  Shared& s = shared();
  const u64 page_stride = (u64)KV_HEADS * PAGE * 64, to_values = a.num_pages * page_stride;
  Place at = {0, a.length[s.rule.slot], *a.epoch, 0, 0, 0, 0};
  int token = a.token[s.rule.slot];
  for (int step = 0;; ++step) {
    const int split = blockIdx.x / HEADS, group = blockIdx.x % HEADS / GROUP;
    const Past part = part_of(at.position, split);
    u32 e;
    float2 turn = make_float2(1.f, 0.f);
    {
      const Share h = share();
      const int t = fresh(threadIdx.x), pair = h.p0 + (t >> 1);
      e = *reinterpret_cast<const u32*>(a.speech + (u64)token * HIDDEN + 2 * t);
      if (t >= h.x0 && t < h.x0 + h.rows / 2) {  // rows that this block owns start its residual
        s.own[2 * (t - h.x0)] = low(e);
        s.own[2 * (t - h.x0) + 1] = high(e);
      }
      if (t < h.qkv_rows && pair / 32 < HEADS + KV_HEADS) turn = a.rotary[(u64)at.position * 32 + pair % 32];
    }
    u16* cache = a.pool;
    at.offset = 0;
    place_in_ring(at);
    Queries queries;
    load_queries(queries, at);
#pragma unroll 1
    for (at.layer = 0;;) {
      ++at.epoch;
      const u16* const keys = cache + (u64)group * PAGE * 64;
      Tile tile;  // what does not wait for others is asked for first
      load_past(tile, keys, to_values, page_stride, part.from + here().warp * TILE_POSITIONS, split < part.splits ? part.to : 0, here());
      make_queries(a, at, queries, cache, to_values, e, turn);
      if (split < part.splits) attend(tile, part, keys, to_values, page_stride, here());
      Gate gate;
      put_out(a, at, part.splits, gate);
      put_down(a, at, gate);
      cache += 2 * to_values;
      at.offset += share().bytes;
      place_in_ring(at);
      if (++at.layer == LAYERS) break;
      load_queries(queries, at);
      put_residual(a, at);
    }
    // The cache's new keys and values must be seen by the blocks that attend in the next step.
    if (threadIdx.x < 32) __threadfence();
    Head head;
    load_head(head, at);
    put_residual(a, at);
    ++at.epoch;
    put_scores(a, at, head);
    mark(21);
    at.chunk0 += step_chunks();
    if (blockIdx.x == GRID - 1) {  // it has no part in attention
      int drawn = sample(a.words + WORDS_LOGITS, at.epoch, step, threadIdx.x);
      if (threadIdx.x == 0) move_on(a, drawn, step, left, at.position, at.epoch);
    }
    bar_sync<4, WITH_HELPER>();
    mark(22);
    token = s.next_token;
    if (token < 0) break;
    ++at.position;
  }
  if (threadIdx.x == 0) s.quit = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1) decode(const Args a) {
  Shared& s = shared();
  const int t = threadIdx.x, head = blockIdx.x % HEADS, split = blockIdx.x / HEADS;
  const int slot = *a.slots;
  if (slot < 0) return;
  const int left = min(a.remaining[slot], a.num_steps);
  if (a.stop[slot] != 0 || left <= 0) return;
  if (t == 0) {
    for (int i = 0; i < STAGES; ++i) arrival_init(&s.full[i]);
    arrival_init_done();
    for (int w = 0; w < WARPS; ++w) s.consumed[w] = 0;
    s.quit = 0;
    s.flight = FLIGHT_BUSY;
    s.rule = {a.min_place[slot], a.seed[slot], a.place[slot], a.tau_r[slot], a.top_p[slot], a.temperature[slot],
              a.kind[slot], a.top_k[slot], a.win_size[slot], a.decoded[slot], slot};
    s.out_count = a.out_count[slot];
    s.remaining = a.remaining[slot];
  }
  for (int i = t; i < min(a.table_width, MAX_PAGES); i += THREADS + 64) s.pages[i] = a.table[(u64)slot * a.table_width + i];
  for (int i = t; i < (int)(sizeof(s.partial) / 4); i += THREADS + 64) s.partial[i] = 0.f;
  for (int i = t; i < DOWN_CHUNKS * 16; i += THREADS + 64) s.h[i / (DOWN_CHUNKS * 8)][i % (DOWN_CHUNKS * 8)] = 0;
  for (int i = t; i < (int)(sizeof(s.merge) / 4); i += THREADS + 64) (&s.merge[0][0][0])[i] = 0.f;
  if (t < 32) s.squares[t / 16][t % 16] = 0.f;
  if (t < RECENT) s.recent[t] = a.recent[slot * RECENT + t];
  // Words of parts that long were not in use must not look like new ones: 16 bits of an epoch come again.
  if (split < SPLITS && t < 32) put_pair(a.words + WORDS_PARTS + (head * SPLITS + split) * 32 + t, 0.f, 0.f, *a.epoch);
  mark_from();
  __syncthreads();
  if (t < THREADS) run_workers(a, left);
  else if (t < THREADS + 32) run_helper(a);
  else if (t == THREADS + 32) produce(a.weights + (u64)blockIdx.x * a.block_bytes, step_chunks(), left);
  put_marks(a.words);
}
