// The phases of a layer, as the warps with columns run them.

// x of the layer before.
__device__ __forceinline__ float2 take_x(const Args& a, const Place& at, const Lane& n) {
  set_flight(FLIGHT);
  const u64 word = take_pair(a.words + WORDS_XD + word_of_x(n.t), at.epoch - 1);
  set_flight(FLIGHT_BUSY);
  return make_float2(first_of(word), second_of(word));
}

// What waits in registers for x: weights of the norm, this warp's columns of query-key-value rows, the bias.
struct Queries { u32 gain, bias; uint4 rows[1][4]; };
__device__ __forceinline__ void load_queries(Queries& w, const Place& at) {
  const Lane n = here();
  const Share h = share();
  wait_at({at.base, at.turn});
  load_tile<0>(w.rows[0], spot(at, h.at_qkv), h.qkv_rows / 2, 0, n);
  w.gain = ring_4(at.base + n.t * 4);
  w.bias = ring_4(at.base + ROW_BYTES + (min(n.t, 15) & ~1) * 2);
  release(at, h.at_out, n.warp, n.lane);
}

// 1: query-key-value rows; words of the heads, and keys and values into the cache. `e` is the step's own embedding,
// `turn` the rotation of the row that this thread finishes.
__device__ __forceinline__ void make_queries(const Args& a, const Place& at, const Queries& w, u16* cache, u64 to_values, u32 e,
                                             float2 turn) {
  Shared& s = shared();
  const Lane n = here();
  const Share h = share();
  float a0 = low(e), a1 = high(e);
  mark(0);
  if (at.layer) {
    const float2 x = take_x(a, at, n);
    a0 = x.x; a1 = x.y;
  }
  mark(1);
  stage(a0 * low(w.gain), a1 * high(w.gain), n);
  rows_times_x(w.rows, s.partial + OF_QKV * SUMS, s.squares[0], a0 * a0 + a1 * a1, n);
  sync_workers();
  mark(2);
  if (n.t >= 32) return;
  float y = fmaf(row_sum(OF_QKV + row_of(n.t & 15)), norm_scale(s.squares[0]), n.t & 1 ? high(w.bias) : low(w.bias));
  const float other = __shfl_xor_sync(FULL, y, 1);
  y = n.t & 1 ? y * turn.x + other * turn.y : y * turn.x - other * turn.y;
  const int pair = h.p0 + (n.t >> 1), which = pair / 32;
  if (which < HEADS) y *= 0.18033688f;  // 1 / sqrt(64), in powers of two
  else y = low(pair_of(y, 0.f) & 0xffffu);
  const float next = __shfl_down_sync(FULL, y, 1);
  if (n.t >= h.qkv_rows) return;
  if (n.t % 2 == 0) put_pair(a.words + WORDS_QKV + pair, y, next, at.epoch);
  if (which < HEADS) return;
  const u64 page_stride = (u64)KV_HEADS * PAGE * 64;
  cache[(which >= HEADS + KV_HEADS ? to_values : 0) + s.pages[at.position / PAGE] * page_stride
        + (u64)((which - HEADS) % KV_HEADS * PAGE + at.position % PAGE) * 64 + pair % 32 + 32 * (n.t & 1)] =
      (u16)(__float_as_uint(y) >> 16);
}

// What waits in registers for x: this warp's weights of the norm, its columns of gate and up rows.
struct Gate { u32 gain; uint4 rows[GATE_TILES][4]; };
template <int FROM, int TO>
__device__ __forceinline__ void load_gate(Gate& gate, const Place& at, const Share& h, const Lane& n) {
  const Spot rows = spot(at, h.at_gate);
  if (FROM == 0) {
    const Spot norm = spot(at, h.at_norm + n.warp * 128);
    wait_at(norm);
    gate.gain = ring_4(norm.at + n.lane * 4);
  }
#pragma unroll
  for (int i = FROM; i < min(TO, GATE_TILES); ++i) {
    load_tile<INTER / GRID>(gate.rows[i], rows, h.gate_rows / 2, i, n);
    release(at, min(h.at_gate + (i + 1) * WARPS * PIECE, h.at_down), n.warp, n.lane);
  }
}

// 3: the parts of attention, joined; output rows. A warp's columns are those of one head. Rows 0 to 7 of its tile are of its
// first 32 columns, 8 to 15 the same rows of the others.
__device__ __forceinline__ void put_out(const Args& a, const Place& at, int splits, Gate& gate) {
  Shared& s = shared();
  const Lane n = here();
  const Share h = share();
  const Spot rows = spot(at, h.at_out + n.warp * h.rows * 128);
  wait_at(rows, h.rows * 128);
  const uint4 w0 = ring_16(rows.at + n.lane * 16), w1 = ring_16(rows.at + h.rows * 64 + n.lane * 16);
  release(at, h.at_norm, n.warp, n.lane);
  load_gate<0, EARLY_TILES>(gate, at, h, n);
  float y0, y1;
  mark(6);
  set_flight(FLIGHT_PARTS);
  take_parts(a.words, splits, at.epoch, n, y0, y1);
  set_flight(FLIGHT_BUSY);
  stage(y0, y1, n);
  const uint4 x = staged((n.g >> 1) & 1, n);
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
  multiply(c, w0.x, w0.y, w0.z, w0.w, x.x, x.y);
  multiply(d, w1.x, w1.y, w1.z, w1.w, x.z, x.w);
  float sum = n.q & 1 ? (c[2] + c[3]) + (d[2] + d[3]) : (c[0] + c[1]) + (d[0] + d[1]);
  sum += __shfl_xor_sync(FULL, sum, 1);
  if (n.q == 0) s.partial[(OF_OUT + n.g) * SUMS + n.warp] = sum;
  const Owner owner = own_rows();
  sync_workers();
  mark(8);
  put_own_rows(a.words + WORDS_XO, owner, OF_OUT, at.epoch);
  mark(9);
}

// Columns of the down product: 16 for each of four tiles, an odd last eight of two tiles together.
__device__ __forceinline__ void load_down(uint4 (&down)[4][DOWN_CHUNKS / 2 + 1], const Place& at, const Share& h, const Lane& n) {
#pragma unroll
  for (int k = 0; k < DOWN_CHUNKS / 2; ++k) {
    const Spot p = spot(at, h.at_down + (k * WARPS + n.warp) * PIECE);
    wait_at(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) down[i][k] = *reinterpret_cast<const uint4*>(raw_shared + p.at + n.lane * 16 + i * 512);
    release(at, h.at_down + (k + 1) * WARPS * PIECE, n.warp, n.lane);
  }
  if (DOWN_CHUNKS % 2) {
    const Spot p = spot(at, h.at_down + DOWN_CHUNKS / 2 * WARPS * PIECE + n.warp * PIECE / 2);
    wait_at(p);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      down[i][DOWN_CHUNKS / 2] = *reinterpret_cast<const uint4*>(raw_shared + p.at + n.lane * 16 + i * 512);
  }
  release(at, h.bytes, n.warp, n.lane);
}

// 4: gate and up rows; down columns of what they make. Rows 0 to 7 of a down tile are even rows of x, 8 to 15 the odd ones
// behind them. A lane's sums of two rows go to the rows' owner.
__device__ __forceinline__ void put_down(const Args& a, const Place& at, Gate& gate) {
  Shared& s = shared();
  const Lane n = here();
  const Share h = share();
  load_gate<EARLY_TILES, PRELOAD>(gate, at, h, n);
  mark(10);
  set_flight(FLIGHT);
  const u64 word = take_pair(a.words + WORDS_XO + word_of_x(n.t), at.epoch);
  mark(11);
  set_flight(FLIGHT_BUSY);
  const float a0 = first_of(word), a1 = second_of(word);
  stage(a0 * low(gate.gain), a1 * high(gate.gain), n);
  load_gate<PRELOAD, MOST_TILES>(gate, at, h, n);
  rows_times_x(gate.rows, s.partial + OF_GATE * SUMS, s.squares[1], a0 * a0 + a1 * a1, n);
  mark(12);
  // The sums do not wait for the columns of the other warps.
  constexpr int FINISHING = (2 * MOST_UNITS + 31) / 32 * 32;
  if (n.t >= FINISHING) bar_arrive<5, THREADS>();
  uint4 down[4][DOWN_CHUNKS / 2 + 1];
  load_down(down, at, h, n);
  mark(13);
  if (n.t < FINISHING) bar_sync<5, THREADS>();
  const bool finishes = n.t < (h.gate_rows + 31) / 32 * 32;
  float y = 0.f;
  if (finishes) y = row_sum(OF_GATE + row_of(min(n.t, GATE_TILES * 16 - 1))) * norm_scale(s.squares[1]);
  mark(14);
  if (finishes) {  // an even thread has a gate row, the next its up row
    const float other = __shfl_xor_sync(FULL, y, 1), gate = n.t & 1 ? other : y, up = n.t & 1 ? y : other;
    const float made = __fdividef(gate, 1.f + __expf(-gate)) * up;
    const u32 half = pair_of(made, 0.f) & 0xffffu;
    if (n.t < h.gate_rows) s.h[n.t & 1][n.t >> 1] = n.t & 1 ? (u16)pair_of(made - low(half), 0.f) : (u16)half;
  }
  const int pair = n.warp * 32 + n.q * 8 + n.g;
  const int owner = ((pair + 1) * GRID - 1) / PAIRS;
  u64* const to = a.words + WORDS_DOWN + ((u64)owner * GRID + blockIdx.x) * OWN_PAIRS + pair - owner * PAIRS / GRID;
  sync_workers();
  mark(15);
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
#pragma unroll
  for (int k = 0; k < DOWN_CHUNKS; k += 2) {
    const int odd = k + 1 < DOWN_CHUNKS ? k + 1 : k;
    const u32 h0 = *reinterpret_cast<const u32*>(&s.h[n.g & 1][k * 8 + n.q * 2]);
    const u32 h1 = odd > k ? *reinterpret_cast<const u32*>(&s.h[n.g & 1][odd * 8 + n.q * 2]) : 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (odd > k) multiply(c[i], down[i][k / 2].x, down[i][k / 2].y, down[i][k / 2].z, down[i][k / 2].w, h0, h1);
      else if (i % 2 == 0) multiply(c[i], down[i / 2][k / 2].x, down[i / 2][k / 2].y, 0u, 0u, h0, h1);
      else multiply(c[i], down[i / 2][k / 2].z, down[i / 2][k / 2].w, 0u, 0u, h0, h1);
    }
  }
  float even = c[0][0] + c[0][1], odd = c[0][2] + c[0][3];
#pragma unroll
  for (int i = 1; i < 4; ++i)
    if (n.q == i) { even = c[i][0] + c[i][1]; odd = c[i][2] + c[i][3]; }
  put_pair(to, even, odd, at.epoch);
  mark(16);
}

// 5: a lane takes the sums of one block for half of the rows that this block owns.
__device__ __forceinline__ void put_residual(const Args& a, const Place& at) {
  Shared& s = shared();
  const Lane n = here();
  const Share h = share();
  float v[4] = {0.f, 0.f, 0.f, 0.f};
  set_flight(FLIGHT_SUMS);
  const int words = min(2, h.rows / 2 - 2 * (n.t & 1));
  for (int i = n.t; i < 2 * GRID; i += THREADS) {
    if (words <= 0) continue;
    const u64* from = a.words + WORDS_DOWN + (u64)blockIdx.x * GRID * OWN_PAIRS + 2 * i;
    u64 w0, w1;
    do peek2(from, w0, w1); while (!is_new_pair(w0, at.epoch) || (words == 2 && !is_new_pair(w1, at.epoch)));
    v[0] += first_of(w0); v[1] += second_of(w0);
    if (words == 2) { v[2] += first_of(w1); v[3] += second_of(w1); }
  }
  __syncwarp();
  set_flight(FLIGHT_BUSY);
  mark(17);
  const bool second = n.t & 2, odd = n.t & 4;
  float u0 = second ? v[2] : v[0], u1 = second ? v[3] : v[1];
  u0 += __shfl_xor_sync(FULL, second ? v[0] : v[2], 2);
  u1 += __shfl_xor_sync(FULL, second ? v[1] : v[3], 2);
  float r = odd ? u1 : u0;
  r += __shfl_xor_sync(FULL, odd ? u0 : u1, 4);
  r += __shfl_xor_sync(FULL, r, 8);
  r += __shfl_xor_sync(FULL, r, 16);
  if (n.lane < 8) s.partial[(OF_DOWN + (n.t & 1) * 4 + (n.t & 2) + (n.t >> 2 & 1)) * SUMS + n.warp] = r;
  const Owner owner = own_rows();
  sync_workers();
  put_own_rows(a.words + WORDS_XD, owner, OF_DOWN, at.epoch);
  mark(18);
}

// What waits in registers for the last x: weights of the norm, this warp's columns of the head.
struct Head { u32 gain; uint4 rows[HEAD_TILES][4]; };
__device__ __forceinline__ void load_head(Head& w, const Place& at) {
  const Lane n = here();
  const int b = fresh(blockIdx.x), rows = 2 * ((b + 1) * VOCAB_PAIRS / GRID - b * VOCAB_PAIRS / GRID);
  wait_at({at.base, at.turn});
  w.gain = ring_4(at.base + n.t * 4);
#pragma unroll
  for (int i = 0; i < HEAD_TILES; ++i) {
    load_tile<VOCAB_PAIRS / GRID>(w.rows[i], spot(at, PIECE), rows / 2, i, n);
    if (i + 1 < HEAD_TILES) release(at, PIECE + (i + 1) * WARPS * PIECE, n.warp, n.lane);
  }
  __syncwarp();
  if (n.lane == 0) shared().consumed[n.warp] = at.chunk0 + step_chunks();
  mark(19);
}

// Behind the layers: norm and head.
__device__ __forceinline__ void put_scores(const Args& a, const Place& at, const Head& w) {
  Shared& s = shared();
  const Lane n = here();
  const int b = fresh(blockIdx.x), v0 = b * VOCAB_PAIRS / GRID, rows = 2 * ((b + 1) * VOCAB_PAIRS / GRID - v0);
  const float2 x = take_x(a, at, n);
  mark(20);
  const float a0 = x.x, a1 = x.y;
  stage(a0 * low(w.gain), a1 * high(w.gain), n);
  rows_times_x(w.rows, s.partial + OF_GATE * SUMS, s.squares[0], a0 * a0 + a1 * a1, n);
  sync_workers();
  if (n.t < rows && 2 * v0 + n.t < VOCAB) {
    const float score = row_sum(OF_GATE + row_of(n.t)) * norm_scale(s.squares[0]);
    put_one(a.words + WORDS_LOGITS + 2 * v0 + n.t, __float_as_uint(score), at.epoch);
  }
}

// What the drawn id changes; one thread.
__device__ __forceinline__ void move_on(const Args& a, int drawn, int step, int left, int position, u32 epoch) {
  Shared& s = shared();
  const int stop = drawn < 0 ? 2 : drawn >= SPEECH ? 1 : 0, decoded = s.rule.decoded + step, slot = s.rule.slot;
  const bool last = stop != 0 || step + 1 >= left;
  put_one(a.words + WORDS_TOKEN, last ? 0xffffffffu : (u32)drawn, epoch);
  s.next_token = last ? -1 : drawn;
  const int count = s.out_count + step;
  a.length[slot] = position + 1;
  if (drawn >= 0) {
    s.recent[decoded & (RECENT - 1)] = a.recent[slot * RECENT + (decoded & (RECENT - 1))] = drawn;
    if (count < a.out_capacity) a.out[slot * a.out_capacity + count] = drawn;
    a.out_count[slot] = count + 1;
    a.decoded[slot] = decoded + 1;
    a.place[slot] = s.rule.place + step + 1;
    a.token[slot] = drawn;
  }
  a.stop[slot] = stop;
  a.remaining[slot] = s.remaining - step - 1;
  if (last) *a.epoch = epoch;
}
