
// All blocks of one Euler step in one resident kernel, for rows that fit one tile. Behind dit_hopper.cu.
//
// 120 thread blocks stay on their multiprocessors, in clusters of four (an H200 has room for 30 of these); counters in
// memory tell when a phase is done. A product with so few rows is bound by what each multiprocessor reads from the L2
// cache, so a cluster shares the columns of one tile and cuts the depth: each block multiplies DEPTH channels, and then
// finishes some of the rows with the sums of the others, always in the same order. Weights, and keys and values of
// earlier chunks, are on their way while the phases before them run.

constexpr int BLOCKS = 120, CLUSTER = 4, MINE = ROWS / CLUSTER, PHASES = 5;
constexpr int PANELS = DEPTH / PANEL, A_PANEL = ROWS * 128;
constexpr int KEY_SLOTS = 3, TABLE = 304;
constexpr int QKV = 104, OUT = 40, IN = 72;  // columns of a cluster
constexpr int SUM_TILES = (1024 + OUT - 1) / OUT;
constexpr u32 A_AT = 0, W_AT = PANELS * A_PANEL, OUT_AT = W_AT + QKV * DEPTH * 2, FF_AT = OUT_AT + OUT * DEPTH * 2;
constexpr u32 Q_AT = FF_AT + 2 * OUT * DEPTH * 2, KEYS_AT = Q_AT + TILE_BYTES;
constexpr u32 RESIDENT_BYTES = KEYS_AT + KEY_SLOTS * 2 * TILE_BYTES;
static_assert(PANELS * A_PANEL + 3072 <= TILE_BYTES + KEY_SLOTS * 2 * TILE_BYTES, "queries and keys make room for rows");
static_assert(ROWS * (QKV + 8) * 4 <= PANELS * A_PANEL, "sums lie where the rows were");

struct Layer {
  const bf16* qkv;
  const float* qkv_folded;
  const bf16* out;
  const float *out_bias, *out_gate, *out_scale;
  const bf16* in;
  const float* in_folded;
  const bf16* ff;
  const float *ff_bias, *ff_gate, *ff_scale;
};

struct Arguments {
  const Layer* layers;
  bf16* scaled;
  float *sums, *hidden;
  bf16 *query, *mixed, *inner, *arena;
  const int *starts, *counts, *steps;
  const i64 *here, *table;
  const float* rope;
  u32* done;  // of each layer and phase, zero at the beginning
  i64 layer_size, step_stride;
  int num_layers, rows, padded, first_tiles, num_steps, positions, chunk, table_stride;
  float scale;
};

__device__ __forceinline__ void signal(u32* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Gives up after a second or so: then the results are wrong, but nothing hangs.
__device__ __forceinline__ void wait_for_all(const u32* counter, int& patience) {
  if (threadIdx.x == 0) {
    u32 value = 0;
    while (value < BLOCKS && patience > 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
      patience--;
    }
  }
  __syncthreads();
}

template <int N> __device__ __forceinline__ void get_weights(u32 to, const bf16* w, int depth, int rows) {
  for (int i = threadIdx.x; i < N * DEPTH / 8; i += THREADS) {
    int row = i / (DEPTH / 8), piece = i % (DEPTH / 8);
    copy_async(to + piece / 8 * (N * 128) + row * 128 + ((piece % 8 ^ row % 8) << 4), w + (i64)min(row, rows - 1) * depth + piece * 8);
  }
}
__device__ __forceinline__ void get_rows(u32 to, const bf16* a, int rows, int depth) {
  for (int panel = 0; panel < PANELS; panel++) {
    for (int i = threadIdx.x; i < rows * 8; i += THREADS) {
      int row = i / 8, piece = i % 8;
      copy_async(to + panel * A_PANEL + row * 128 + ((piece ^ row % 8) << 4), a + (i64)row * depth + panel * PANEL + piece * 8);
    }
    commit_copies();
  }
}
template <int N, int PENDING> __device__ __forceinline__ void add_panel(float (&sums)[N / 2], u32 a, u32 w, int panel) {
  wait_copies<PENDING>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  a += panel * A_PANEL + threadIdx.x / 128 * 64 * 128, w += panel * N * 128;
  for (int k = 0; k < PANEL / 16; k++) multiply<N>(sums, describe(a + k * 32), describe(w + k * 32));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void finish_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Leaves the block's sums where the rows were, for the cluster to read.
template <int N> __device__ __forceinline__ void show(char* memory, const float (&sums)[N / 2]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int half = 0; half < 2; half++) {
    int row = warp * 16 + half * 8 + lane / 4;
    float2* at = reinterpret_cast<float2*>(memory + A_AT + (row * (N + 8) + lane % 4 * 2) * 4);
    if (row < ROWS)
      for (int j = 0; j < N / 8; j++) at[j * 4] = make_float2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}
template <int N, int COUNT>
__device__ __forceinline__ void collect(float4 (&sums)[COUNT], u32 base, u32 rank, int first, int step, int column) {
  float4 parts[CLUSTER][COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    u32 at = base + A_AT + ((rank * MINE + min(first + i * step, MINE - 1)) * (N + 8) + column) * 4;
#pragma unroll
    for (int part = 0; part < CLUSTER; part++) parts[part][i] = load_at(at_rank(at, part));
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int part = 0; part < CLUSTER; part++) {
      float4 x = parts[part][i];
      sums[i].x += x.x, sums[i].y += x.y, sums[i].z += x.z, sums[i].w += x.w;
    }
  }
}

// Gate, residual, and what the next norm needs, of four columns of one row.
__device__ __forceinline__ void add_to_hidden(
    const Arguments& p, float4 x, float4 y, float4 b, float4 g, float4 s, bool keep, int row, int column, int tile) {
  constexpr int COLUMNS = 1024, TILES = SUM_TILES;
  i64 at = (i64)row * COLUMNS + column;
  x.x += g.x * (y.x + b.x), x.y += g.y * (y.y + b.y), x.z += g.z * (y.z + b.z), x.w += g.w * (y.w + b.w);
  if (!keep) x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (keep) {
    *reinterpret_cast<float4*>(p.hidden + at) = x;
    *reinterpret_cast<uint2*>(p.scaled + at) = pack(make_float4(x.x * s.x, x.y * s.y, x.z * s.z, x.w * s.w));
  }
  float sum = x.x + x.y + x.z + x.w, squares = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  for (int offset = 8; offset; offset /= 2) {
    sum += __shfl_xor_sync(~0u, sum, offset);
    squares += __shfl_xor_sync(~0u, squares, offset);
  }
  if (keep && threadIdx.x % 16 == 0) {
    p.sums[(i64)row * TILES + tile] = sum;
    p.sums[((i64)p.padded + row) * TILES + tile] = squares;
  }
}

// What the shares of a head found for four channels of one frame.
__device__ __forceinline__ float4 combine(
    u32 base, const float (&tops)[2][KEYS], const float (&weights)[2][KEYS], int frame, int column) {
  float4 x[8], y = make_float4(0.f, 0.f, 0.f, 0.f);
  float share_top[8], share_weight[8], highest = -infinity(), total = 0.f;
#pragma unroll
  for (int share = 0; share < 8; share++) {
    int half = share / 4;
    x[share] = load_at(at_rank(base + A_AT + ((half * KEYS + frame) * PART_STRIDE + column) * 4, share % 4));
    share_top[share] = load1_at(at_rank(shared_address(&tops[half][frame]), share % 4));
    share_weight[share] = load1_at(at_rank(shared_address(&weights[half][frame]), share % 4));
  }
  for (int share = 0; share < 8; share++) highest = fmaxf(highest, share_top[share]);
#pragma unroll
  for (int share = 0; share < 8; share++) {
    float factor = exp2f(share_top[share] - highest);
    total += factor * share_weight[share];
    y.x += factor * x[share].x, y.y += factor * x[share].y, y.z += factor * x[share].z, y.w += factor * x[share].w;
  }
  return make_float4(y.x / total, y.y / total, y.z / total, y.w / total);
}

__device__ __forceinline__ Keys head_keys(
    const Arguments& p, const i64 (&pages)[2][TABLE], int layer, int step, int pair, u32 base) {
  int group = pair / 16, head = pair % 16;
  i64 inner = step * p.step_stride + layer * p.layer_size + (i64)head * p.chunk * WIDTH;
  int length = group * p.chunk < p.rows ? p.starts[group] + p.counts[group] : 0;
  return {p.arena, pages[group], inner, (i64)16 * p.chunk * WIDTH, p.chunk, length, base + KEYS_AT};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks(const __grid_constant__ Arguments p) {
  __shared__ float2 norms[MINE];
  __shared__ i64 pages[2][TABLE];
  __shared__ float tops[2][KEYS], weights[2][KEYS];
  constexpr int DIM = 1024, INNER = 2048, HEADS = 16;
  u32 unaligned_base = shared_address(unaligned), base = unaligned_base + (1024 - unaligned_base % 1024) % 1024;
  char* memory = unaligned + (base - unaligned_base);
  u32 rank = cluster_rank();
  int tile = blockIdx.x / CLUSTER, step = p.steps[0], my_row = rank * MINE;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, patience = 4000000;

  // Queries, keys, values: a thread takes four columns in three rows.
  constexpr int QKV_STEP = THREADS / (QKV / 4), QKV_COUNT = (MINE + QKV_STEP - 1) / QKV_STEP;
  int qkv_first = threadIdx.x / (QKV / 4), qkv_quad = threadIdx.x % (QKV / 4) * 4, qkv_column = tile * QKV + qkv_quad;
  bool qkv_used = qkv_column < 3 * DIM && qkv_first < QKV_STEP;
  if (!qkv_used) qkv_column = 0;
  int part = qkv_column / DIM, channel = qkv_column % DIM, qkv_head = channel / 64;
  bool turn = part < 2 && qkv_head == 0;
  int target[QKV_COUNT];
  i64 page[QKV_COUNT];
  float2 cosine[QKV_COUNT], sine[QKV_COUNT];
#pragma unroll
  for (int i = 0; i < QKV_COUNT; i++) {
    int row = min(my_row + qkv_first + i * QKV_STEP, p.rows - 1), group = row / p.chunk, frame = row % p.chunk;
    target[i] = frame < p.counts[group] ? frame : -1;
    page[i] = p.here[group] + step * p.step_stride +
              ((i64)((part - 1) * HEADS + qkv_head) * p.chunk + frame) * 64 + channel % 64;
    int position = turn ? min(p.starts[group] + frame, p.positions - 1) : 0;
    cosine[i] = *reinterpret_cast<const float2*>(p.rope + (i64)position * 32 + channel % 64 / 2);
    sine[i] = *reinterpret_cast<const float2*>(p.rope + ((i64)p.positions + position) * 32 + channel % 64 / 2);
  }
  // Attention: a cluster for each head of each group (two clusters have two of these), every fourth block of 64 keys
  // for each thread block.
  for (int i = threadIdx.x; i < 2 * TABLE; i += THREADS) {
    int group = i / TABLE, n = i % TABLE;
    if (group * p.chunk < p.rows && n * p.chunk < p.starts[group] + p.counts[group])
      pages[group][n] = p.table[(i64)group * p.table_stride + n];
  }
  int first_group = tile / HEADS, start = first_group * p.chunk < p.rows ? p.starts[first_group] : 0, ahead = 0;
  while (ahead < KEY_SLOTS && ((int)rank + ahead * CLUSTER + 1) * KEYS <= start) ahead++;  // known early
  // Sixteen threads a row, ten of them used, for the products that add to the hidden state.
  constexpr int ADD_STEP = THREADS / 16, ADD_COUNT = (MINE + ADD_STEP - 1) / ADD_STEP;
  int add_first = threadIdx.x / 16, add_quad = threadIdx.x % 16 * 4, add_column = tile * OUT + add_quad;
  bool adds = tile * OUT < DIM, feeds = tile * IN < INNER;  // the others wait
  bool add_used = add_quad < OUT && add_column < DIM;
  if (!add_used) add_column = 0, add_quad = 0;

  get_weights<QKV>(base + W_AT, p.layers[0].qkv + (i64)tile * QKV * DIM + rank * DEPTH, DIM, 3 * DIM - tile * QKV);
  commit_copies();
  __syncthreads();
  wait_for_previous();
  for (int index = 0; index < p.num_layers; index++) {
    const Layer layer = p.layers[index];
    u32* done = p.done + index * PHASES;
    {
      float4 weighted = load4(layer.qkv_folded + (i64)step * 3 * DIM + qkv_column);
      float4 shift = load4(layer.qkv_folded + (i64)(p.num_steps + step) * 3 * DIM + qkv_column);
      if (index) wait_for_all(done - 1, patience);
      get_rows(base + A_AT, p.scaled + rank * DEPTH, p.rows, DIM);
      Keys keys = head_keys(p, pages, index, step, tile, base);
      for (int slot = 0; slot < ahead; slot++) keys.fetch<THREADS>(rank + slot * CLUSTER, slot);
      if (adds) {
        get_weights<OUT>(base + OUT_AT, layer.out + (i64)tile * OUT * DIM + rank * DEPTH, DIM, DIM - tile * OUT);
        for (int half = 0; half < 2; half++)
          get_weights<OUT>(base + FF_AT + half * OUT * DEPTH * 2,
                           layer.ff + (i64)tile * OUT * INNER + (rank * 2 + half) * DEPTH, INNER, DIM - tile * OUT);
      }
      commit_copies();
      row_norms<MINE>(norms, p.sums, my_row, p.rows, p.padded, index ? SUM_TILES : p.first_tiles, DIM);
      float sums[QKV / 2];
      for (int i = 0; i < QKV / 2; i++) sums[i] = 0.f;
      add_panel<QKV, 4>(sums, base + A_AT, base + W_AT, 0);
      add_panel<QKV, 3>(sums, base + A_AT, base + W_AT, 1);
      add_panel<QKV, 2>(sums, base + A_AT, base + W_AT, 2);
      add_panel<QKV, 1>(sums, base + A_AT, base + W_AT, 3);
      finish_products();
      __syncthreads();
      if (feeds) get_weights<IN>(base + W_AT, layer.in + (i64)tile * IN * DIM + rank * DEPTH, DIM, INNER - tile * IN);
      commit_copies();
      show<QKV>(memory, sums);
      float4 sum[QKV_COUNT];
      collect<QKV>(sum, base, rank, qkv_first, QKV_STEP, qkv_quad);
#pragma unroll
      for (int i = 0; i < QKV_COUNT; i++) {
        int r = qkv_first + i * QKV_STEP, row = my_row + r;
        if (!qkv_used || r >= MINE || row >= p.rows) continue;
        float4 x = unfold(sum[i], norms[r], weighted, shift);
        if (turn)
          x = make_float4(x.x * cosine[i].x - x.y * sine[i].x, x.y * cosine[i].x + x.x * sine[i].x,
                          x.z * cosine[i].y - x.w * sine[i].y, x.w * cosine[i].y + x.z * sine[i].y);
        if (part == 0)
          *reinterpret_cast<uint2*>(p.query + (i64)row * DIM + channel) = pack(x);
        else if (target[i] >= 0)
          *reinterpret_cast<uint2*>(p.arena + page[i] + index * p.layer_size) = pack(x);
      }
      signal(done);
    }
    {
      wait_for_all(done, patience);
      for (int pair = tile; pair * p.chunk < p.rows * HEADS; pair += BLOCKS / CLUSTER) {
        int group = pair / HEADS, head = pair % HEADS, known = pair == tile ? ahead : 0;
        Keys keys = head_keys(p, pages, index, step, pair, base);
        int length = keys.length, blocks = (length + KEYS - 1) / KEYS;
        int mine = blocks > (int)rank ? (blocks - (int)rank + CLUSTER - 1) / CLUSTER : 0;
        for (int i = threadIdx.x; i < KEYS * 8; i += THREADS) {
          int row = i / 8, piece = i % 8;
          const bf16* from = p.query + ((i64)group * p.chunk + min(row, p.chunk - 1)) * DIM + head * WIDTH;
          copy_async(base + Q_AT + swizzled(row, piece), from + piece * 8);
        }
        float out[8][4], top[2] = {-infinity(), -infinity()}, weight[2] = {0.f, 0.f};
        for (int j = 0; j < 8; j++) for (int i = 0; i < 4; i++) out[j][i] = 0.f;
        u32 q[4][4];
        for (int first = 0; first < mine; first += KEY_SLOTS) {
          for (int slot = first ? 0 : known; slot < KEY_SLOTS && first + slot < mine; slot++)
            keys.fetch<THREADS>(rank + (first + slot) * CLUSTER, slot);
          commit_copies();
          wait_copies<0>();
          __syncthreads();
          if (!first)
            for (int k = 0; k < 4; k++)
              load_matrices(q[k], base + Q_AT + swizzled(warp % 4 * 16 + lane % 16, k * 2 + lane / 16));
          for (int slot = warp / 4; slot < KEY_SLOTS && first + slot < mine; slot += 2) {
            u32 k_at = base + KEYS_AT + slot * 2 * TILE_BYTES;
            attend(out, top, weight, q, k_at, k_at + TILE_BYTES, (rank + (first + slot) * CLUSTER) * KEYS, length, p.scale);
          }
          __syncthreads();
        }
        for (int h = 0; h < 2; h++) {
          weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
          weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
          int row = warp % 4 * 16 + h * 8 + lane / 4, half = warp / 4;
          float2* at = reinterpret_cast<float2*>(memory + A_AT + ((half * KEYS + row) * PART_STRIDE + lane % 4 * 2) * 4);
          for (int j = 0; j < 8; j++) at[j * 4] = make_float2(out[j][h * 2], out[j][h * 2 + 1]);
          if (lane % 4 == 0) tops[half][row] = top[h], weights[half][row] = weight[h];
        }
        __syncwarp();
        cluster_arrive();
        cluster_wait();
        int frame = rank * 16 + threadIdx.x / 16, column = threadIdx.x % 16 * 4;
        if (frame < p.chunk) {
          float4 y = combine(base, tops, weights, frame, column);
          *reinterpret_cast<uint2*>(p.mixed + ((i64)group * p.chunk + frame) * DIM + head * WIDTH + column) = pack(y);
        }
        if (pair + BLOCKS / CLUSTER < 2 * HEADS) {  // the next head's sums take the place of these
          __syncwarp();
          cluster_arrive();
          cluster_wait();
        }
      }
      signal(done + 1);
    }
    if (adds) {
      float4 b = load4(layer.out_bias + add_column), g = load4(layer.out_gate + (i64)step * DIM + add_column);
      float4 s = load4(layer.out_scale + (i64)step * DIM + add_column), x[ADD_COUNT], total[ADD_COUNT];
      for (int i = 0; i < ADD_COUNT; i++)
        x[i] = load4(p.hidden + (i64)min(my_row + add_first + i * ADD_STEP, p.rows - 1) * DIM + add_column);
      wait_for_all(done + 1, patience);
      get_rows(base + A_AT, p.mixed + rank * DEPTH, p.rows, DIM);
      float sums[OUT / 2];
      for (int i = 0; i < OUT / 2; i++) sums[i] = 0.f;
      add_panel<OUT, 3>(sums, base + A_AT, base + OUT_AT, 0);
      add_panel<OUT, 2>(sums, base + A_AT, base + OUT_AT, 1);
      add_panel<OUT, 1>(sums, base + A_AT, base + OUT_AT, 2);
      add_panel<OUT, 0>(sums, base + A_AT, base + OUT_AT, 3);
      finish_products();
      __syncthreads();
      show<OUT>(memory, sums);
      collect<OUT>(total, base, rank, add_first, ADD_STEP, add_quad);
#pragma unroll
      for (int i = 0; i < ADD_COUNT; i++) {
        int r = add_first + i * ADD_STEP, row = my_row + r;
        add_to_hidden(p, x[i], total[i], b, g, s, add_used && r < MINE && row < p.rows, row, add_column, tile);
      }
    }
    signal(done + 2);
    if (feeds) {
      constexpr int N = IN, STEP = THREADS / (N / 4), COUNT = (MINE + STEP - 1) / STEP;
      int first = threadIdx.x / (N / 4), quad = threadIdx.x % (N / 4) * 4, column = tile * N + quad;
      bool used = column < INNER && first < STEP;
      if (!used) column = 0;
      float4 weighted = load4(layer.in_folded + (i64)step * INNER + column);
      float4 shift = load4(layer.in_folded + (i64)(p.num_steps + step) * INNER + column);
      wait_for_all(done + 2, patience);
      get_rows(base + A_AT, p.scaled + rank * DEPTH, p.rows, DIM);
      row_norms<MINE>(norms, p.sums, my_row, p.rows, p.padded, SUM_TILES, DIM);
      float sums[N / 2];
      for (int i = 0; i < N / 2; i++) sums[i] = 0.f;
      add_panel<N, 3>(sums, base + A_AT, base + W_AT, 0);
      add_panel<N, 2>(sums, base + A_AT, base + W_AT, 1);
      add_panel<N, 1>(sums, base + A_AT, base + W_AT, 2);
      add_panel<N, 0>(sums, base + A_AT, base + W_AT, 3);
      finish_products();
      __syncthreads();
      show<N>(memory, sums);
      float4 sum[COUNT];
      collect<N>(sum, base, rank, first, STEP, quad);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        int r = first + i * STEP;
        if (!used || r >= MINE || my_row + r >= p.rows) continue;
        float4 x = unfold(sum[i], norms[r], weighted, shift);
        float y[4] = {x.x, x.y, x.z, x.w};
        for (int n = 0; n < 4; n++) y[n] /= 1.f + __expf(-1.5957691216057308f * (y[n] + 0.044715f * y[n] * y[n] * y[n]));
        *reinterpret_cast<uint2*>(p.inner + (i64)(my_row + r) * INNER + column) = pack(make_float4(y[0], y[1], y[2], y[3]));
      }
    }
    signal(done + 3);
    wait_for_all(done + 3, patience);
    if (adds) {
      float4 b = load4(layer.ff_bias + add_column), g = load4(layer.ff_gate + (i64)step * DIM + add_column);
      float4 s = load4(layer.ff_scale + (i64)step * DIM + add_column), x[ADD_COUNT], total[ADD_COUNT];
      get_rows(base + A_AT, p.inner + rank * 2 * DEPTH, p.rows, INNER);
      get_rows(base + Q_AT, p.inner + (rank * 2 + 1) * DEPTH, p.rows, INNER);
      for (int i = 0; i < ADD_COUNT; i++)
        x[i] = load4(p.hidden + (i64)min(my_row + add_first + i * ADD_STEP, p.rows - 1) * DIM + add_column);
      if (index + 1 < p.num_layers)
        get_weights<QKV>(base + W_AT, p.layers[index + 1].qkv + (i64)tile * QKV * DIM + rank * DEPTH, DIM, 3 * DIM - tile * QKV);
      commit_copies();
      float sums[OUT / 2];
      for (int i = 0; i < OUT / 2; i++) sums[i] = 0.f;
      u32 second = base + FF_AT + OUT * DEPTH * 2;
      add_panel<OUT, 8>(sums, base + A_AT, base + FF_AT, 0);
      add_panel<OUT, 7>(sums, base + A_AT, base + FF_AT, 1);
      add_panel<OUT, 6>(sums, base + A_AT, base + FF_AT, 2);
      add_panel<OUT, 5>(sums, base + A_AT, base + FF_AT, 3);
      add_panel<OUT, 4>(sums, base + Q_AT, second, 0);
      add_panel<OUT, 3>(sums, base + Q_AT, second, 1);
      add_panel<OUT, 2>(sums, base + Q_AT, second, 2);
      add_panel<OUT, 1>(sums, base + Q_AT, second, 3);
      finish_products();
      __syncthreads();
      show<OUT>(memory, sums);
      collect<OUT>(total, base, rank, add_first, ADD_STEP, add_quad);
#pragma unroll
      for (int i = 0; i < ADD_COUNT; i++) {
        int r = add_first + i * ADD_STEP, row = my_row + r;
        add_to_hidden(p, x[i], total[i], b, g, s, add_used && r < MINE && row < p.rows, row, add_column, tile);
      }
    } else if (index + 1 < p.num_layers) {
      get_weights<QKV>(base + W_AT, p.layers[index + 1].qkv + (i64)tile * QKV * DIM + rank * DEPTH, DIM, 3 * DIM - tile * QKV);
      commit_copies();
    }
    signal(done + 4);
  }
  let_next_start();
  cluster_arrive();
  cluster_wait();  // no thread block may end while others read from it
}
