// Matrix products of the DiT's blocks over the rows of many streams, for Hopper GPUs (compute capability 9.0).
//
// dit_products.py puts multiply<N> ahead of this file; arguments and results are those of dit_reference.py, with all
// groups of a launch at one Euler step. A thread block makes a tile of channels by rows: the channels are the height of
// the matrix unit's product (64 per group of four warps), the rows its width, so that a tile is two or four groups of
// 50 frames and 16 streams fill the chip exactly once. One more warp fetches the operands with tensor copies, into a
// ring of stages; the two blocks of a cluster share their rows, each fetching half of them for both.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int DEPTH = 64;  // channels of a stage: rows of 128 bytes, swizzled
constexpr int CHUNK = 50, WIDTH = 64, HEADS = 16, DIM = 1024, INNER = 2048;
constexpr int SHARED_BYTES = 224 * 1024, MOST_STAGES = 8;
constexpr float EPS = 1e-6f;

struct alignas(64) TensorMap {
  char bytes[128];
};

struct Arguments {
  TensorMap weight, first_rows, other_rows;  // of the two blocks of a cluster
  const float *sums, *folded;                // of the norm ahead: qkv and ff_in
  const float *bias, *gate, *scale;          // add
  float *hidden, *out_sums;
  bf16* out;  // queries, inner values, or the norm's channels times its scale
  bf16* arena;
  const int *starts, *counts, *steps;
  const i64* here;
  const float* rope;
  i64 layer_offset, step_stride;
  int depth, num_rows, padded, tiles, steps_size, positions;
};

enum Kind { QKV, FF_IN, ADD };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Tells both blocks of the cluster.
__device__ __forceinline__ void arrive_everywhere(u32 barrier) {
#pragma unroll
  for (u32 rank = 0; rank < 2; rank++) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
  }
}
// An error of the launch after a second or so, rather than a device that hangs.
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  for (int patience = 1 << 22; patience; patience--) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    if (done) return;
  }
  __trap();
}
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int channel, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(channel), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch_for_both(u32 to, const TensorMap* map, int channel, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to), "l"(map), "r"(channel), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
}
__device__ __forceinline__ float low(u32 both) { return __int_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __int_as_float(both & 0xFFFF0000); }
// What wgmma wants to know of an operand: rows of 128 bytes, swizzled in pieces of 16, eight rows a group.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ float gelu(float x) {
  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)); towards minus infinity x / inf = 0
  float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.f + __expf(fminf(-2.f * u, 80.f)));
}
template <int LEFT> __device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

template <int GROUPS, int N> struct Shape {
  static constexpr int COLUMNS = GROUPS * 64, THREADS = GROUPS * 128, USED = N / 100 * 100;
  static constexpr u32 WEIGHT_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = WEIGHT_BYTES + N * DEPTH * 2;
  static constexpr int FIT = (SHARED_BYTES - 1024) / STAGE_BYTES, STAGES = FIT < MOST_STAGES ? FIT : MOST_STAGES;
  static constexpr int FIRST = (N / 8 + 1) / 2 * 8;  // rows that the first block of a cluster fetches
};

template <int GROUPS> __device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
}

template <int GROUPS, int N>
__device__ __forceinline__ void produce(const Arguments& a, u32 memory, u32 full, u32 empty, int column, int row) {
  using S = Shape<GROUPS, N>;
  u32 rank = cluster_rank();
  const TensorMap* rows = rank ? &a.other_rows : &a.first_rows;
  u32 rows_at = S::WEIGHT_BYTES + rank * (S::FIRST * DEPTH * 2);
  int first = row + rank * S::FIRST, blocks = a.depth / DEPTH, ahead = min(blocks, S::STAGES);
  for (int k = 0; k < ahead; k++) {
    expect_bytes(full + k * 8, S::STAGE_BYTES);
    fetch(memory + k * S::STAGE_BYTES, &a.weight, k * DEPTH, column, full + k * 8);
  }
  wait_for_previous();  // the weights did not depend on it
  for (int k = 0; k < ahead; k++)
    fetch_for_both(memory + k * S::STAGE_BYTES + rows_at, rows, k * DEPTH, first, full + k * 8);
  for (int k = ahead, slot = 0, parity = 0; k < blocks; k++) {
    u32 at = memory + slot * S::STAGE_BYTES;
    wait_for(empty + slot * 8, parity);
    expect_bytes(full + slot * 8, S::STAGE_BYTES);
    fetch(at, &a.weight, k * DEPTH, column, full + slot * 8);
    fetch_for_both(at + rows_at, rows, k * DEPTH, first, full + slot * 8);
    if (++slot == S::STAGES) slot = 0, parity ^= 1;
  }
}

template <int GROUPS, int N>
__device__ __forceinline__ void consume(float (&total)[N / 2], u32 memory, u32 full, u32 empty, int blocks) {
  using S = Shape<GROUPS, N>;
  u32 mine = threadIdx.x / 128 * (64 * DEPTH * 2);
  bool tells = threadIdx.x % 128 == 0;
#pragma unroll
  for (int i = 0; i < N / 2; i++) total[i] = 0.f;
  for (int k = 0, slot = 0, parity = 0, last = 0; k < blocks; k++) {
    wait_for(full + slot * 8, parity);
    u64 weight = describe(memory + slot * S::STAGE_BYTES + mine);
    u64 rows = describe(memory + slot * S::STAGE_BYTES + S::WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++) multiply<N>(total, weight + i * 2, rows + i * 2);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_products<1>();
    if (tells && k > 0 && k - 1 + S::STAGES < blocks) arrive_everywhere(empty + last * 8);
    last = slot;
    if (++slot == S::STAGES) slot = 0, parity ^= 1;
  }
  wait_products<0>();
}

// Mean and inverse deviation of the tile's rows, from sums of `tiles` tiles of their channels.
template <int GROUPS, int N> __device__ __forceinline__ void load_norms(float2* norms, const Arguments& a, int row) {
  for (int r = threadIdx.x; r < N; r += GROUPS * 128) {
    float sum = 0.f, squares = 0.f;
    if (row + r < a.num_rows) {
      const float* at = a.sums + (i64)(row + r) * a.tiles;
#pragma unroll 8
      for (int t = 0; t < a.tiles; t++) {
        sum += at[t];
        squares += at[(i64)a.padded * a.tiles + t];
      }
    }
    float mean = sum / DIM;
    norms[r] = make_float2(mean, rsqrtf(fmaxf(squares / DIM - mean * mean, 0.f) + EPS));
  }
}

// Ends the norm, and puts the tile into shared memory as rows of channels.
template <Kind KIND, int GROUPS, int N>
__device__ __forceinline__ void stage_folded(
    const float (&total)[N / 2], const float2* norms, u32 memory, const float (&weighted)[2], const float (&shift)[2]) {
  constexpr u32 ROW_BYTES = GROUPS * 128 + 16;  // no two rows of a matrix in the same banks
  int lane = threadIdx.x % 32;
  u32 to = memory + lane % 8 * ROW_BYTES + (threadIdx.x / 32 * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float4 two = *reinterpret_cast<const float4*>(norms + j * 8 + lane % 4 * 2);
    float x[4];
    for (int h = 0; h < 2; h++) {
      x[h * 2] = two.y * (total[j * 4 + h * 2] - two.x * weighted[h]) + shift[h];
      x[h * 2 + 1] = two.w * (total[j * 4 + h * 2 + 1] - two.z * weighted[h]) + shift[h];
    }
    if (KIND == FF_IN)
      for (int i = 0; i < 4; i++) x[i] = gelu(x[i]);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to + j * 8 * ROW_BYTES),
                 "r"(pack(x[0], x[1])), "r"(pack(x[2], x[3])) : "memory");
  }
}

__device__ __forceinline__ u32 turn(u32 pair, float cosine, float sine) {
  float even = low(pair), odd = high(pair);
  return pack(even * cosine - odd * sine, odd * cosine + even * sine);
}

template <Kind KIND, int GROUPS, int N>
__device__ __forceinline__ void store_folded(const Arguments& a, const char* staged, int column, int row, int step) {
  constexpr int PIECES = GROUPS * 8, ROW_BYTES = GROUPS * 128 + 16;  // pieces of eight channels
  int rows = min(Shape<GROUPS, N>::USED, a.num_rows - row);
  for (int i = threadIdx.x; i < rows * PIECES; i += GROUPS * 128) {
    int r = i / PIECES, channel = column + i % PIECES * 8;
    uint4 x = *reinterpret_cast<const uint4*>(staged + r * ROW_BYTES + i % PIECES * 16);
    bf16* to;
    if (KIND == FF_IN) {
      to = a.out + (i64)(row + r) * INNER + channel;
    } else {
      int part = channel / DIM, head = channel % DIM / WIDTH, group = (row + r) / CHUNK, frame = (row + r) % CHUNK;
      if (part < 2 && head == 0) {
        int position = min(a.starts[group] + frame, a.positions - 1);
        const float* at = a.rope + (i64)position * (WIDTH / 2) + channel % WIDTH / 2;
        float4 cosine = *reinterpret_cast<const float4*>(at);
        float4 sine = *reinterpret_cast<const float4*>(at + (i64)a.positions * (WIDTH / 2));
        x = make_uint4(turn(x.x, cosine.x, sine.x), turn(x.y, cosine.y, sine.y), turn(x.z, cosine.z, sine.z),
                       turn(x.w, cosine.w, sine.w));
      }
      if (part == 0) {
        to = a.out + (i64)(row + r) * DIM + channel;
      } else {
        if (frame >= a.counts[group]) continue;
        to = a.arena + a.here[group] + step * a.step_stride + a.layer_offset +
             ((part - 1) * HEADS + head) * (CHUNK * WIDTH) + frame * WIDTH + channel % WIDTH;
      }
    }
    *reinterpret_cast<uint4*>(to) = x;
  }
}

template <int GROUPS, int N> __device__ __forceinline__ void stage_plain(const float (&total)[N / 2], float* staged) {
  constexpr int STRIDE = GROUPS * 64 + 4;
  int lane = threadIdx.x % 32;
  float* to = staged + lane % 4 * 2 * STRIDE + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++)
    for (int i = 0; i < 4; i++) to[(j * 8 + i % 2) * STRIDE + i / 2 * 8] = total[j * 4 + i];
}

__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

// Gate, residual, and what the next norm needs. Eight threads a row.
template <int GROUPS, int N>
__device__ __forceinline__ void store_added(const Arguments& a, const float* staged, int column, int row, int step) {
  constexpr int STRIDE = GROUPS * 64 + 4, PIECES = GROUPS * 2, TILES = DIM / (GROUPS * 64);
  int lane = threadIdx.x % 32, mine = lane % 8 * 4;
  float4 gate[PIECES], shift[PIECES], scale[PIECES];
  for (int i = 0; i < PIECES; i++) {
    int channel = column + i * 32 + mine;
    float4 g = load4(a.gate + step * DIM + channel), b = load4(a.bias + channel);
    gate[i] = g, shift[i] = make_float4(g.x * b.x, g.y * b.y, g.z * b.z, g.w * b.w);
    scale[i] = load4(a.scale + step * DIM + channel);
  }
  int rows = min(Shape<GROUPS, N>::USED, a.num_rows - row);
#pragma unroll 2
  for (int r = threadIdx.x / 32 * 4 + lane / 8; r < (rows + 3) / 4 * 4; r += GROUPS * 16) {
    bool valid = r < rows;
    i64 at = (i64)(row + (valid ? r : 0)) * DIM + column + mine;
    float4 old[PIECES];
    for (int i = 0; i < PIECES; i++) old[i] = load4(a.hidden + at + i * 32);
    float sum = 0.f, squares = 0.f;
    for (int i = 0; i < PIECES; i++) {
      float4 x = load4(staged + r * STRIDE + i * 32 + mine), g = gate[i], b = shift[i], s = scale[i];
      x = make_float4(old[i].x + (g.x * x.x + b.x), old[i].y + (g.y * x.y + b.y), old[i].z + (g.z * x.z + b.z),
                      old[i].w + (g.w * x.w + b.w));
      sum += x.x + x.y + (x.z + x.w);
      squares += x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
      if (valid) {
        *reinterpret_cast<float4*>(a.hidden + at + i * 32) = x;
        *reinterpret_cast<uint2*>(a.out + at + i * 32) = make_uint2(pack(x.x * s.x, x.y * s.y), pack(x.z * s.z, x.w * s.w));
      }
    }
    for (int offset = 4; offset; offset /= 2) {
      sum += __shfl_xor_sync(~0u, sum, offset);
      squares += __shfl_xor_sync(~0u, squares, offset);
    }
    if (valid && lane % 8 == 0) {
      float* to = a.out_sums + (i64)(row + r) * TILES + column / (GROUPS * 64);
      to[0] = sum;
      to[(i64)a.padded * TILES] = squares;
    }
  }
}

extern __shared__ char unaligned[];

template <Kind KIND, int GROUPS, int N> __device__ __forceinline__ void product(const Arguments& a) {
  using S = Shape<GROUPS, N>;
  constexpr int CHANNELS = KIND == QKV ? 3 * DIM : KIND == FF_IN ? INNER : DIM, TILES = CHANNELS / S::COLUMNS;
  static_assert(CHANNELS % S::COLUMNS == 0 && TILES % 2 == 0, "the blocks of a cluster share their rows");
  __shared__ alignas(8) u64 barriers[2 * S::STAGES];
  __shared__ alignas(16) float2 norms[KIND == ADD ? 1 : N];
  u32 start = shared_address(unaligned), memory = (start + 1023) / 1024 * 1024;
  u32 full = shared_address(barriers), empty = full + S::STAGES * 8;
  int column = blockIdx.x % TILES * S::COLUMNS, row = blockIdx.x / TILES * S::USED;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; i++) init_barrier(full + i * 8, 1), init_barrier(empty + i * 8, 2 * GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x >= S::THREADS) {
    if (threadIdx.x == S::THREADS) produce<GROUPS, N>(a, memory, full, empty, column, row);
    return;
  }
  int step = a.steps[0];
  float weighted[2], shift[2], total[N / 2];
  if (KIND != ADD) {
    for (int h = 0; h < 2; h++) {
      int channel = column + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + h * 8;
      weighted[h] = a.folded[step * CHANNELS + channel];
      shift[h] = a.folded[a.steps_size + step * CHANNELS + channel];
    }
  }
  wait_for_previous();
  if (KIND != ADD) load_norms<GROUPS, N>(norms, a, row);
  consume<GROUPS, N>(total, memory, full, empty, a.depth / DEPTH);
  let_next_start();
  sync_consumers<GROUPS>();  // all have read the stages, whose memory now takes the tile
  char* staged = unaligned + (memory - start);
  if constexpr (KIND == ADD) {
    stage_plain<GROUPS, N>(total, reinterpret_cast<float*>(staged));
    sync_consumers<GROUPS>();
    store_added<GROUPS, N>(a, reinterpret_cast<const float*>(staged), column, row, step);
  } else {
    stage_folded<KIND, GROUPS, N>(total, norms, memory, weighted, shift);
    sync_consumers<GROUPS>();
    store_folded<KIND, GROUPS, N>(a, staged, column, row, step);
  }
}

#define PRODUCT(name, kind, groups, n)                                                              \
  extern "C" __global__ void __launch_bounds__(groups * 128 + 32, 1)                                \
      name##_##groups##_##n(const __grid_constant__ Arguments a) {                                  \
    product<kind, groups, n>(a);                                                                    \
  }
PRODUCT(qkv, QKV, 1, 104)
PRODUCT(qkv, QKV, 2, 104)
PRODUCT(qkv, QKV, 3, 104)
PRODUCT(qkv, QKV, 2, 200)
PRODUCT(qkv, QKV, 3, 200)
PRODUCT(ff_in, FF_IN, 1, 104)
PRODUCT(ff_in, FF_IN, 2, 104)
PRODUCT(ff_in, FF_IN, 2, 200)
PRODUCT(add, ADD, 1, 104)
PRODUCT(add, ADD, 2, 104)
PRODUCT(add, ADD, 1, 200)
PRODUCT(add, ADD, 2, 200)
