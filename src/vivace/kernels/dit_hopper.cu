// Attention of the streaming DiT for Hopper GPUs (compute capability 9.0), and what it shares with dit_resident.cu.
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
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
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
template <> __device__ __forceinline__ void multiply<40>(float (&d)[20], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19}, %20, %21, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
      : "l"(a), "l"(b));
}

template <> __device__ __forceinline__ void multiply<72>(float (&d)[36], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, %36, %37, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
      : "l"(a), "l"(b));
}

template <> __device__ __forceinline__ void multiply<104>(float (&d)[52], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n104k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51}, %52, %53, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
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

extern __shared__ char unaligned[];

__device__ __forceinline__ float4 unfold(float4 x, float2 norm, float4 weighted, float4 shift) {
  return make_float4(
      norm.y * (x.x - norm.x * weighted.x) + shift.x, norm.y * (x.y - norm.x * weighted.y) + shift.y,
      norm.y * (x.z - norm.x * weighted.z) + shift.z, norm.y * (x.w - norm.x * weighted.w) + shift.w);
}
__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

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
