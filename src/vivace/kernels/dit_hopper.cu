// Kernels of the streaming DiT's blocks for Hopper GPUs (compute capability 9.0) and few rows.
//
// A product with so few rows is bound by what each multiprocessor reads from the L2 cache. So a cluster shares the
// columns of one tile and cuts the depth: each block multiplies DEPTH channels, then the blocks exchange their sums
// through shared memory, each finishing some of the rows, always in the same order. A block has its weights in shared
// memory before the kernel ahead of it has ended.
//
// Arguments and results are those of dit_reference.py; all groups of a launch are at one Euler step.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int ROWS = 104;   // of a tile; two groups of 50 frames fit
constexpr int DEPTH = 256;  // channels of a block
constexpr int THREADS = 256;
constexpr int PANEL = 64;   // channels side by side in shared memory: rows of 128 bytes, swizzled
constexpr float EPS = 1e-6f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_async_or_zero(u32 to, const void* from, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void trigger() { asm volatile("griddepcontrol.launch_dependents;"); }
#ifdef LATE
__device__ __forceinline__ void let_next_start() {}
#else
__device__ __forceinline__ void let_next_start() { trigger(); }
#endif
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
  u32 result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
__device__ __forceinline__ float4 load_at(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float load1_at(u32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ uint2 pack(float4 x) { return make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

// What wgmma wants to know of an operand: rows of 128 bytes, swizzled in pieces of 16, eight rows a group.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b);
template <> __device__ __forceinline__ void multiply<32>(float (&d)[16], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
}

template <> __device__ __forceinline__ void multiply<64>(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}

template <> __device__ __forceinline__ void multiply<96>(float (&d)[48], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "l"(a), "l"(b));
}

// Mean and inverse deviation of this block's rows, from sums of `tiles` tiles of their channels. Eight threads a row.
template <int MINE>
__device__ __forceinline__ void row_norms(
    float2* norms, const float* sums, int first, int rows, int padded, int tiles, int channels) {
  static_assert(MINE * 8 <= THREADS, "all rows at once");
  int r = threadIdx.x / 8;
  float sum = 0.f, squares = 0.f;
  if (r < MINE && first + r < rows) {
    const float* at = sums + (i64)(first + r) * tiles;
#pragma unroll 4
    for (int t = threadIdx.x % 8; t < tiles; t += 8) {
      sum += at[t];
      squares += at[(i64)padded * tiles + t];
    }
  }
  for (int offset = 4; offset; offset /= 2) {
    sum += __shfl_xor_sync(~0u, sum, offset);
    squares += __shfl_xor_sync(~0u, squares, offset);
  }
  if (r < MINE && threadIdx.x % 8 == 0) {
    float mean = sum / channels;
    norms[r] = make_float2(mean, rsqrtf(fmaxf(squares / channels - mean * mean, 0.f) + EPS));
  }
}

// The product of a tile: after it, each block holds the sums of all blocks of its cluster in `parts`.
// `a` and `w` are [rows, depth] and [columns, depth].
template <int N, int CLUSTER> struct Product {
  static constexpr int MINE = ROWS / CLUSTER;  // rows that a block finishes
  static constexpr int STRIDE = N + 8;         // floats; keeps rows on different banks
  static constexpr int A_PANEL = ROWS * 128, W_PANEL = N * 128, PANELS = DEPTH / PANEL;
  static constexpr int BYTES = PANELS * (A_PANEL + W_PANEL);
  static_assert(ROWS * STRIDE * 4 <= PANELS * A_PANEL, "sums lie where the rows were");
  char* memory;
  u32 base, rank;

  __device__ __forceinline__ void fetch_weights(const bf16* w, int depth) {
    u32 to = base + PANELS * A_PANEL;
    for (int i = threadIdx.x; i < N * DEPTH / 8; i += THREADS) {
      int row = i / (DEPTH / 8), piece = i % (DEPTH / 8);
      u32 at = (piece / 8) * W_PANEL + row * 128 + ((piece % 8 ^ row % 8) << 4);
      copy_async(to + at, w + (i64)row * depth + rank * DEPTH + piece * 8);
    }
  }
  // One commit group for each panel; the first takes the weights along.
  __device__ __forceinline__ void fetch_rows(const bf16* a, int rows, int depth) {
    for (int panel = 0; panel < PANELS; panel++) {
      for (int i = threadIdx.x; i < ROWS * 8; i += THREADS) {
        int row = i / 8, piece = i % 8;
        u32 at = panel * A_PANEL + row * 128 + ((piece ^ row % 8) << 4);
        if (row < rows) copy_async(base + at, a + (i64)row * depth + rank * DEPTH + panel * PANEL + piece * 8);
      }
      commit_copies();
    }
  }
  template <int P> __device__ __forceinline__ void panel(float (&sums)[N / 2]) {
    wait_copies<PANELS - 1 - P>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    u32 a = base + P * A_PANEL + threadIdx.x / 128 * 64 * 128, w = base + PANELS * A_PANEL + P * W_PANEL;
    for (int k = 0; k < PANEL / 16; k++) multiply<N>(sums, describe(a + k * 32), describe(w + k * 32));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void run() {
    float sums[N / 2];
    for (int i = 0; i < N / 2; i++) sums[i] = 0.f;
    panel<0>(sums);
    panel<1>(sums);
    panel<2>(sums);
    panel<3>(sums);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#ifdef LATE
    trigger();
#endif
    __syncthreads();  // the rows are not needed any more; the sums take their place
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int half = 0; half < 2; half++) {
      int row = warp * 16 + half * 8 + lane / 4;
      float2* at = reinterpret_cast<float2*>(memory + (row * STRIDE + lane % 4 * 2) * 4);
      if (row < ROWS)
        for (int j = 0; j < N / 8; j++) at[j * 4] = make_float2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
  // Four columns of the block's rows `first`, `first + step`, ..., added up over the cluster.
  template <int COUNT> __device__ __forceinline__ void totals(float4 (&sums)[COUNT], int first, int step, int column) const {
    float4 parts[CLUSTER][COUNT];  // all are asked for before the first is used
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      u32 at = base + ((rank * MINE + min(first + i * step, MINE - 1)) * STRIDE + column) * 4;
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
  // No block may end while others read from it.
  __device__ __forceinline__ void end() const {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
};

extern __shared__ char unaligned[];

template <int N, int CLUSTER> __device__ __forceinline__ Product<N, CLUSTER> begin() {
  Product<N, CLUSTER> product;
  u32 start = shared_address(unaligned);
  u32 skip = (1024 - start % 1024) % 1024;
  product.memory = unaligned + skip;
  product.base = start + skip;
  product.rank = cluster_rank();
  return product;
}

__device__ __forceinline__ float4 unfold(float4 x, float2 norm, float4 weighted, float4 shift) {
  return make_float4(
      norm.y * (x.x - norm.x * weighted.x) + shift.x, norm.y * (x.y - norm.x * weighted.y) + shift.y,
      norm.y * (x.z - norm.x * weighted.z) + shift.z, norm.y * (x.w - norm.x * weighted.w) + shift.w);
}
__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

extern "C" __global__ void __launch_bounds__(THREADS) qkv(
    const bf16* a, const float* sums, const bf16* w, const float* folded, const float* rope,
    bf16* query, bf16* arena, const int* starts, const int* counts, const int* steps,
    const i64* here, i64 layer_offset, i64 step_stride, int rows, int padded, int tiles, int num_steps, int positions,
    int chunk, int inner, int depth) {
  constexpr int N = 96, CLUSTER = 4, QUADS = N / 4;
  typedef Product<N, CLUSTER> P;
  __shared__ float2 norms[P::MINE];
  P product = begin<N, CLUSTER>();
  let_next_start();
  int columns = 3 * inner, first_column = blockIdx.x / CLUSTER * N, first_row = blockIdx.y * ROWS;
  product.fetch_weights(w + (i64)first_column * depth, depth);
  int step = steps[0], quad = threadIdx.x % QUADS, column = first_column + quad * 4;
  float4 weighted = load4(folded + (i64)step * columns + column);
  float4 shift = load4(folded + (i64)(num_steps + step) * columns + column);
  int part = column / inner, channel = column % inner, head = channel / 64;
  // What each row of this thread needs, before the kernel ahead has ended.
  constexpr int STEP = THREADS / QUADS, COUNT = (P::MINE + STEP - 1) / STEP;
  int my_row = first_row + product.rank * P::MINE, first = threadIdx.x / QUADS;
  bool turn = part < 2 && head == 0;
  int target[COUNT];  // frame in the page; negative: nothing is kept
  i64 page[COUNT];
  float2 cosine[COUNT], sine[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    int row = min(my_row + first + i * STEP, rows - 1), group = row / chunk, frame = row % chunk;
    target[i] = frame < counts[group] ? frame : -1;
    page[i] = here[group] + step * step_stride + layer_offset;
    if (turn) {
      int position = min(starts[group] + frame, positions - 1);
      cosine[i] = *reinterpret_cast<const float2*>(rope + (i64)position * 32 + channel / 2);
      sine[i] = *reinterpret_cast<const float2*>(rope + ((i64)positions + position) * 32 + channel / 2);
    }
  }
  wait_for_previous();
  product.fetch_rows(a + (i64)first_row * depth, rows - first_row, depth);
  row_norms<P::MINE>(norms, sums, my_row, rows, padded, tiles, depth);
  product.run();
  float4 sum[COUNT];
  product.totals(sum, first, STEP, quad * 4);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    int r = first + i * STEP, row = my_row + r;
    if (first >= STEP || r >= P::MINE || row >= rows) continue;
    float4 x = unfold(sum[i], norms[r], weighted, shift);
    if (turn)
      x = make_float4(x.x * cosine[i].x - x.y * sine[i].x, x.y * cosine[i].x + x.x * sine[i].x,
                      x.z * cosine[i].y - x.w * sine[i].y, x.w * cosine[i].y + x.z * sine[i].y);
    if (part == 0) {
      *reinterpret_cast<uint2*>(query + (i64)row * inner + channel) = pack(x);
    } else if (target[i] >= 0) {
      i64 at = ((i64)((part - 1) * (inner / 64) + head) * chunk + target[i]) * 64 + channel % 64;
      *reinterpret_cast<uint2*>(arena + page[i] + at) = pack(x);
    }
  }
  product.end();
}

extern "C" __global__ void __launch_bounds__(THREADS) ff_in(
    const bf16* a, const float* sums, const bf16* w, const float* folded, bf16* out,
    const int* steps, int rows, int padded, int tiles, int num_steps, int columns, int depth) {
  constexpr int N = 64, CLUSTER = 4, QUADS = N / 4;
  typedef Product<N, CLUSTER> P;
  __shared__ float2 norms[P::MINE];
  P product = begin<N, CLUSTER>();
  let_next_start();
  int first_column = blockIdx.x / CLUSTER * N, first_row = blockIdx.y * ROWS;
  product.fetch_weights(w + (i64)first_column * depth, depth);
  int step = steps[0], quad = threadIdx.x % QUADS, column = first_column + quad * 4;
  float4 weighted = load4(folded + (i64)step * columns + column);
  float4 shift = load4(folded + (i64)(num_steps + step) * columns + column);
  wait_for_previous();
  product.fetch_rows(a + (i64)first_row * depth, rows - first_row, depth);
  int my_row = first_row + product.rank * P::MINE;
  row_norms<P::MINE>(norms, sums, my_row, rows, padded, tiles, depth);
  product.run();
  constexpr int STEP = THREADS / QUADS, COUNT = (P::MINE + STEP - 1) / STEP;
  float4 sum[COUNT];
  product.totals(sum, threadIdx.x / QUADS, STEP, quad * 4);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    int r = threadIdx.x / QUADS + i * STEP;
    if (r >= P::MINE || my_row + r >= rows) continue;
    float4 x = unfold(sum[i], norms[r], weighted, shift);
    float y[4] = {x.x, x.y, x.z, x.w};
    for (int n = 0; n < 4; n++) {
      float u = 1.5957691216057308f * (y[n] + 0.044715f * y[n] * y[n] * y[n]);
      y[n] = y[n] / (1.f + __expf(-u));
    }
    *reinterpret_cast<uint2*>(out + (i64)(my_row + r) * columns + column) = pack(make_float4(y[0], y[1], y[2], y[3]));
  }
  product.end();
}

template <int N, int CLUSTER> __device__ __forceinline__ void add_tile(
    const bf16* a, const bf16* w, const float* bias, const float* gate, const float* scale,
    float* hidden, bf16* scaled, float* sums, const int* steps, int rows, int padded, int columns) {
  constexpr int QUADS = N / 4, depth = CLUSTER * DEPTH;
  typedef Product<N, CLUSTER> P;
  static_assert(THREADS / QUADS >= P::MINE, "one row for each thread");
  P product = begin<N, CLUSTER>();
  let_next_start();
  int tile = blockIdx.x / CLUSTER, first_row = blockIdx.y * ROWS;
  product.fetch_weights(w + (i64)tile * N * depth, depth);
  int step = steps[0], quad = threadIdx.x % QUADS, r = threadIdx.x / QUADS, column = tile * N + quad * 4;
  float4 b = load4(bias + column), g = load4(gate + (i64)step * columns + column);
  float4 s = load4(scale + (i64)step * columns + column);
  wait_for_previous();
  product.fetch_rows(a + (i64)first_row * depth, rows - first_row, depth);
  int row = first_row + product.rank * P::MINE + r;
  bool keep = r < P::MINE && row < rows;
  i64 at = (i64)row * columns + column;
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (keep) x = load4(hidden + at);
  product.run();
  float4 total[1];
  product.totals(total, r, 1, quad * 4);
  if (keep) {
    float4 y = total[0];
    x.x += g.x * (y.x + b.x), x.y += g.y * (y.y + b.y), x.z += g.z * (y.z + b.z), x.w += g.w * (y.w + b.w);
    *reinterpret_cast<float4*>(hidden + at) = x;
    *reinterpret_cast<uint2*>(scaled + at) = pack(make_float4(x.x * s.x, x.y * s.y, x.z * s.z, x.w * s.w));
  }
  float sum = x.x + x.y + x.z + x.w, squares = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  for (int offset = QUADS / 2; offset; offset /= 2) {
    sum += __shfl_xor_sync(~0u, sum, offset);
    squares += __shfl_xor_sync(~0u, squares, offset);
  }
  if (keep && quad == 0) {
    int tiles = columns / N;
    sums[(i64)row * tiles + tile] = sum;
    sums[((i64)padded + row) * tiles + tile] = squares;
  }
  product.end();
}

extern "C" __global__ void __launch_bounds__(THREADS) add_1024(
    const bf16* a, const bf16* w, const float* bias, const float* gate, const float* scale,
    float* hidden, bf16* scaled, float* sums, const int* steps, int rows, int padded, int columns) {
  add_tile<32, 4>(a, w, bias, gate, scale, hidden, scaled, sums, steps, rows, padded, columns);
}
extern "C" __global__ void __launch_bounds__(THREADS) add_2048(
    const bf16* a, const bf16* w, const float* bias, const float* gate, const float* scale,
    float* hidden, bf16* scaled, float* sums, const int* steps, int rows, int padded, int columns) {
  add_tile<64, 8>(a, w, bias, gate, scale, hidden, scaled, sums, steps, rows, padded, columns);
}

// Attention: a cluster of four blocks for each head of each group; blocks take every fourth block of 64 keys and
// exchange what they found, each finishing 16 frames.
constexpr int KEYS = 64, SHARES = 4, SLOTS = 3, WIDTH = 64, MOST_PAGES = 512;
constexpr int ROW_BYTES = WIDTH * 2, TILE_BYTES = KEYS * ROW_BYTES, PART_STRIDE = WIDTH + 8;

__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * ROW_BYTES + ((piece ^ row % 8) << 4); }
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_turned(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void multiply16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One block of keys and values for 16 frames of each warp.
__device__ __forceinline__ void attend(
    float (&out)[8][4], float (&top)[2], float (&weight)[2], const u32 (&q)[4][4], u32 k_at, u32 v_at, int first_key,
    int length, float scale) {
  int lane = threadIdx.x % 32;
  float score[8][4];
  for (int j = 0; j < 8; j++) for (int i = 0; i < 4; i++) score[j][i] = 0.f;
  for (int k = 0; k < 4; k++)
    for (int j = 0; j < 4; j++) {
      u32 b[4];
      load_matrices(b, k_at + swizzled(j * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
      multiply16(score[j * 2], q[k], b[0], b[1]);
      multiply16(score[j * 2 + 1], q[k], b[2], b[3]);
    }
  int lane_key = first_key + lane % 4 * 2;
  float higher[2] = {top[0], top[1]};
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 4; i++) {
      score[j][i] = lane_key + j * 8 + i % 2 < length ? score[j][i] * scale : -infinity();
      higher[i / 2] = fmaxf(higher[i / 2], score[j][i]);
    }
  for (int h = 0; h < 2; h++) {
    higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 1));
    higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 2));
    float shrink = exp2f(top[h] - higher[h]);
    weight[h] *= shrink;
    for (int j = 0; j < 8; j++) out[j][h * 2] *= shrink, out[j][h * 2 + 1] *= shrink;
    top[h] = higher[h];
  }
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 4; i++) {
      score[j][i] = exp2f(score[j][i] - top[i / 2]);
      weight[i / 2] += score[j][i];
    }
  for (int k = 0; k < 4; k++) {
    u32 p[4] = {pack(score[k * 2][0], score[k * 2][1]), pack(score[k * 2][2], score[k * 2][3]),
                pack(score[k * 2 + 1][0], score[k * 2 + 1][1]), pack(score[k * 2 + 1][2], score[k * 2 + 1][3])};
    for (int j = 0; j < 4; j++) {
      u32 b[4];
      load_turned(b, v_at + swizzled(k * 16 + lane % 16, j * 2 + lane / 16));
      multiply16(out[j * 2], p, b[0], b[1]);
      multiply16(out[j * 2 + 1], p, b[2], b[3]);
    }
  }
}

struct Keys {
  const bf16* arena;
  const i64* pages;  // in shared memory
  i64 inner, values;
  int chunk, length;
  u32 memory;

  template <int COUNT> __device__ __forceinline__ void fetch(int block, int slot) const {
    u32 to = memory + slot * 2 * TILE_BYTES;
    for (int i = threadIdx.x; i < KEYS * 8; i += COUNT) {
      int row = i / 8, piece = i % 8, key = block * KEYS + row;
      bool valid = key < length;
      int known = valid ? key : 0;
      const bf16* from = arena + pages[known / chunk] + inner + known % chunk * WIDTH + piece * 8;
      copy_async_or_zero(to + swizzled(row, piece), from, valid);
      copy_async_or_zero(to + TILE_BYTES + swizzled(row, piece), from + values, valid);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128) attention(
    const bf16* query, bf16* mixed, const bf16* arena, const int* starts,
    const int* counts, const int* steps, const i64* table, i64 layer_offset, i64 step_stride, int table_stride,
    int chunk, int heads, float scale) {
  __shared__ i64 pages[MOST_PAGES];
  __shared__ float tops[KEYS], weights[KEYS];  // of each frame
  u32 start_of_memory = shared_address(unaligned);
  u32 memory = start_of_memory + (1024 - start_of_memory % 1024) % 1024;
  char* generic = unaligned + (memory - start_of_memory);
  u32 queries = memory, keys_at = memory + TILE_BYTES, parts = keys_at + SLOTS * 2 * TILE_BYTES;
  int rank = cluster_rank(), pair = blockIdx.x / SHARES, group = pair / heads, head = pair % heads;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_start();
  int start = starts[group], length = start + counts[group];
  for (int i = threadIdx.x; i * chunk < length; i += 128) pages[i] = table[(i64)group * table_stride + i];
  __syncthreads();
  Keys keys = {arena, pages, steps[group] * step_stride + layer_offset + (i64)head * chunk * WIDTH,
               (i64)heads * chunk * WIDTH, chunk, length, keys_at};
  int blocks = (length + KEYS - 1) / KEYS, mine = blocks > rank ? (blocks - rank + SHARES - 1) / SHARES : 0;
  // Blocks of earlier chunks do not depend on the kernel ahead.
  int ahead = 0;
  while (ahead < mine && ahead < SLOTS && (rank + ahead * SHARES + 1) * KEYS <= start) {
    keys.fetch<128>(rank + ahead * SHARES, ahead);
    commit_copies();
    ahead++;
  }
  wait_for_previous();
  for (int i = threadIdx.x; i < KEYS * 8; i += 128) {
    int row = i / 8, piece = i % 8;
    const bf16* from = query + ((i64)group * chunk + min(row, chunk - 1)) * heads * WIDTH + head * WIDTH;
    copy_async(queries + swizzled(row, piece), from + piece * 8);
  }
  commit_copies();
  for (; ahead < SLOTS; ahead++) {
    if (ahead < mine) keys.fetch<128>(rank + ahead * SHARES, ahead);
    commit_copies();
  }
  float out[8][4];
  for (int j = 0; j < 8; j++) for (int i = 0; i < 4; i++) out[j][i] = 0.f;
  float top[2] = {-infinity(), -infinity()}, weight[2] = {0.f, 0.f};
  u32 q[4][4];
  for (int n = 0; n < mine; n++) {
    if (n == 0) wait_copies<0>();  // the queries are not the first
    else wait_copies<SLOTS - 1>();
    __syncthreads();
    u32 k_at = keys_at + n % SLOTS * 2 * TILE_BYTES, v_at = k_at + TILE_BYTES;
    if (n == 0)
      for (int k = 0; k < 4; k++) load_matrices(q[k], queries + swizzled(warp * 16 + lane % 16, k * 2 + lane / 16));
    attend(out, top, weight, q, k_at, v_at, (rank + n * SHARES) * KEYS, length, scale);
    __syncthreads();
    if (n + SLOTS < mine) keys.fetch<128>(rank + (n + SLOTS) * SHARES, n % SLOTS);
    commit_copies();
  }
  for (int h = 0; h < 2; h++) {
    weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
    weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
  }
  for (int h = 0; h < 2; h++) {
    int row = warp * 16 + h * 8 + lane / 4;
    float2* at = reinterpret_cast<float2*>(generic + (parts - memory) + (row * PART_STRIDE + lane % 4 * 2) * 4);
    for (int j = 0; j < 8; j++) at[j * 4] = make_float2(out[j][h * 2], out[j][h * 2 + 1]);
    if (lane % 4 == 0) tops[row] = top[h], weights[row] = weight[h];
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  int frame = rank * 16 + threadIdx.x / 8, column = threadIdx.x % 8 * 8;
  if (frame < chunk) {
    float4 x[SHARES][2];
    float share_top[SHARES], share_weight[SHARES], highest = -infinity();
#pragma unroll
    for (int share = 0; share < SHARES; share++) {
      u32 at = at_rank(parts + (frame * PART_STRIDE + column) * 4, share);
      x[share][0] = load_at(at);
      x[share][1] = load_at(at + 16);
      share_top[share] = load1_at(at_rank(shared_address(&tops[frame]), share));
      share_weight[share] = load1_at(at_rank(shared_address(&weights[frame]), share));
    }
    for (int share = 0; share < SHARES; share++) highest = fmaxf(highest, share_top[share]);
    float total = 0.f, y[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int share = 0; share < SHARES; share++) {
      float factor = exp2f(share_top[share] - highest);
      total += factor * share_weight[share];
      float4 a = x[share][0], b = x[share][1];
      float z[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      for (int i = 0; i < 8; i++) y[i] += factor * z[i];
    }
    for (int i = 0; i < 8; i++) y[i] /= total;
    *reinterpret_cast<uint4*>(mixed + ((i64)group * chunk + frame) * heads * WIDTH + head * WIDTH + column) =
        make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();  // no block may end while others read from it
}
