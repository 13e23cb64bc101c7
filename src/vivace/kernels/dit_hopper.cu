// The DiT's blocks for Hopper GPUs (compute capability 9.0), for the one chunk of a stream: attention and its products.
//
// Arguments and results are those of dit_reference.py; all groups of a launch are at one Euler step. A chain of such
// short kernels waits rather than computes. So each lets the next one start at once, which then fetches what does not
// depend on it (weights, keys and values of earlier chunks) into shared memory, and waits; two kernels fit on a
// multiprocessor at a time. What comes late goes from memory straight into the registers of the one warp that needs it.
//
// A thread of a matrix operand holds eight neighbouring channels of its row, 16 bytes, where the instruction wants two
// times two pairs: the order of the summed channels does not matter, if it is the same in both operands.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int CHUNK = 50, WIDTH = 64, HEADS = 16, DIM = 1024, INNER = 2048;
constexpr int WARPS = 8, THREADS = 256;
constexpr float EPS = 1e-6f;

#ifndef TRIGGER
#define TRIGGER 0
#endif
#ifndef TRIGGER_ATTENTION
#define TRIGGER_ATTENTION TRIGGER
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// What the kernel ahead wrote; volatile, so that it stays behind the wait.
__device__ __forceinline__ uint4 load_new(const void* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
__device__ __forceinline__ float4 load_new4(const float* from) {
  uint4 x = load_new(from);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}
__device__ __forceinline__ void store_shared(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 16 rows of a (eight, and the eight after) by 8 rows of b, 16 channels.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ void sync_share(int share) {
  if (share == 0) asm volatile("bar.sync 1, 64;" ::: "memory");
  else if (share == 1) asm volatile("bar.sync 2, 64;" ::: "memory");
  else if (share == 2) asm volatile("bar.sync 3, 64;" ::: "memory");
  else asm volatile("bar.sync 4, 64;" ::: "memory");
}

// 32 channels.
__device__ __forceinline__ void multiply32(float (&d)[4], const uint4& a, const uint4& after, const uint4& b) {
  multiply(d, a.x, after.x, a.y, after.y, b.x, b.y);
  multiply(d, a.z, after.z, a.w, after.w, b.z, b.w);
}

// ---- products: a block makes one of 64 tiles of channels for the rows of a group

constexpr int TILES = 64, SHARES = 4;  // of the depth, each of two warps: rows 0 to 31, and those after

struct Arguments {
  const bf16 *rows, *weight;
  const float *sums, *folded;         // of the norm ahead: qkv and ff_in
  const float *bias, *gate, *scale;   // add
  float *hidden, *out_sums;
  bf16 *out, *arena;  // queries, inner values, or the norm's channels times its scale
  const int *starts, *counts, *steps;
  const i64* here;
  const float* rope;
  i64 layer_offset, step_stride;
  int padded, steps_size, positions;
};

enum Kind { QKV, FF_IN, ADD };

template <int COLUMNS, int DEPTH> struct Shape {
  static constexpr int STRIDE = DEPTH * 2 + 64;     // bytes of a weight's row: two rows side by side lie in all banks
  static constexpr int SUMS = COLUMNS + 4;          // floats of a row of sums, likewise
  static constexpr int SHARE = DEPTH / SHARES, STEPS = SHARE / 32;
};

template <int COLUMNS, int DEPTH>
__device__ __forceinline__ void fetch_weights(const bf16* weight, u32 memory, int share, int thread) {
  using S = Shape<COLUMNS, DEPTH>;
  constexpr int PIECES = S::SHARE / 8;
#pragma unroll
  for (int i = 0; i < COLUMNS * PIECES / 64; i++) {
    int row = (thread + i * 64) / PIECES, piece = share * PIECES + (thread + i * 64) % PIECES;
    copy_async(memory + row * S::STRIDE + piece * 16, weight + row * DEPTH + piece * 8);
  }
}

// N times eight rows from `first` on, over a share of the depth. `between` runs when the last loads are under way.
template <int COLUMNS, int DEPTH, int N, int AHEAD, class Between>
__device__ __forceinline__ void multiply_share(u32 memory, const bf16* rows, int first, int share, Between between) {
  using S = Shape<COLUMNS, DEPTH>;
  int lane = threadIdx.x % 32;
  const bf16* from[N];
  for (int n = 0; n < N; n++)
    from[n] = rows + min(first + n * 8 + lane / 4, CHUNK - 1) * DEPTH + share * S::SHARE + lane % 4 * 8;
  u32 weight = memory + lane / 4 * S::STRIDE + (share * S::SHARE + lane % 4 * 8) * 2;
  float total[COLUMNS / 16][N][4];
  for (int m = 0; m < COLUMNS / 16; m++)
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) total[m][n][i] = 0.f;
  uint4 x[AHEAD][N];
#pragma unroll
  for (int s = 0; s < AHEAD; s++)
    for (int n = 0; n < N; n++) x[s][n] = load_new(from[n] + s * 32);
  wait_copies();
  sync_share(share);  // its two warps fetched its weights
#pragma unroll
  for (int s = 0; s < S::STEPS; s++) {
    if (s == S::STEPS - AHEAD && TRIGGER == 1) let_next_start();
    if (s == S::STEPS - 2) between();
#pragma unroll
    for (int m = 0; m < COLUMNS / 16; m++) {
      uint4 a = load_shared(weight + m * 16 * S::STRIDE + s * 64);
      uint4 after = load_shared(weight + (m * 16 + 8) * S::STRIDE + s * 64);
#pragma unroll
      for (int n = 0; n < N; n++) multiply32(total[m][n], a, after, x[s % AHEAD][n]);
    }
    if (s + AHEAD < S::STEPS)
#pragma unroll
      for (int n = 0; n < N; n++) x[s % AHEAD][n] = load_new(from[n] + (s + AHEAD) * 32);
  }
  if (TRIGGER == 2) let_next_start();
  sync_block();  // all have read the weights, whose memory now takes the sums
  u32 to = memory + ((share * 56 + first + lane % 4 * 2) * S::SUMS + lane / 4) * 4;
#pragma unroll
  for (int m = 0; m < COLUMNS / 16; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_shared(to + ((n * 8 + i % 2) * S::SUMS + m * 16 + i / 2 * 8) * 4, total[m][n][i]);
}

template <int COLUMNS, int DEPTH>
__device__ __forceinline__ float4 add_shares(const float* shared, int row, int column) {
  constexpr int SUMS = Shape<COLUMNS, DEPTH>::SUMS;
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int share = 0; share < SHARES; share++) {
    float4 y = *reinterpret_cast<const float4*>(shared + (share * 56 + row) * SUMS + column);
    x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
  }
  return x;
}

__device__ __forceinline__ float gelu(float x) {
  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)); towards minus infinity x / inf = 0
  float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.f + __expf(fminf(-2.f * u, 80.f)));
}

// Where four neighbouring channels of queries, keys or values go; null for frames that are not valid.
__device__ __forceinline__ bf16* place_of(const Arguments& a, int group, int frame, int channel, int count, i64 page) {
  int part = channel / DIM, inside = channel % DIM;
  if (part == 0) return a.out + (i64)(group * CHUNK + frame) * DIM + inside;
  if (frame >= count) return nullptr;
  return a.arena + page + ((part - 1) * HEADS + inside / WIDTH) * (CHUNK * WIDTH) + frame * WIDTH + inside % WIDTH;
}

extern __shared__ __align__(128) char memory_of_block[];

template <Kind KIND, int COLUMNS, int DEPTH, int AHEAD> __device__ __forceinline__ void product(const Arguments& a) {
  constexpr int QUADS = COLUMNS / 4, LOADS = KIND == ADD ? 1 : 8, CONSTANTS = KIND == ADD ? 3 : 2;
  __shared__ __align__(16) float constants[CONSTANTS][COLUMNS];
  __shared__ float2 norms[KIND == ADD ? 1 : CHUNK];
  if (TRIGGER == 0) let_next_start();
  u32 memory = shared_address(memory_of_block);
  int warp = threadIdx.x / 32, share = warp % SHARES, half = warp / SHARES, group = blockIdx.y;
  int column = blockIdx.x * COLUMNS;
  fetch_weights<COLUMNS, DEPTH>(a.weight + (i64)column * DEPTH, memory, share, half * 32 + threadIdx.x % 32);
  int step = a.steps[0], start = 0, count = 0;
  i64 page = 0;
  if (KIND == QKV) {
    start = a.starts[group], count = a.counts[group];
    page = a.here[group] + step * a.step_stride + a.layer_offset;
  }
  if (threadIdx.x < COLUMNS) {
    int at = step * (TILES * COLUMNS) + column + threadIdx.x;
    constants[0][threadIdx.x] = KIND == ADD ? a.gate[at] : a.folded[at];
    constants[1][threadIdx.x] = KIND == ADD ? a.scale[at] : a.folded[a.steps_size + at];
    if (KIND == ADD) constants[CONSTANTS - 1][threadIdx.x] = a.bias[column + threadIdx.x];
  }
  wait_for_previous();
  float4 loaded[LOADS];
  int row = threadIdx.x / 4, quarter = threadIdx.x % 4;
  auto between = [&] {
    if (row >= CHUNK) return;
    if (KIND == ADD) {
      loaded[0] = load_new4(a.hidden + (i64)(group * CHUNK + row) * DIM + column + quarter * 4);
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        loaded[i] = load_new4(a.sums + (i64)(i / 4 * a.padded + group * CHUNK + row) * TILES + i % 4 * 16 + quarter * 4);
    }
  };
  const bf16* rows = a.rows + (i64)group * CHUNK * DEPTH;
  if (half == 0) multiply_share<COLUMNS, DEPTH, 4, AHEAD>(memory, rows, 0, share, between);
  else multiply_share<COLUMNS, DEPTH, 3, AHEAD>(memory, rows, 32, share, between);
  const float* sums = reinterpret_cast<const float*>(memory_of_block);
  if constexpr (KIND == ADD) {
    static_assert(QUADS == 4, "a thread makes the channels that it loaded");
    __syncthreads();
    if (row >= CHUNK) return;  // whole warps, but for the last, whose lanes above do not take part
    float4 x = add_shares<COLUMNS, DEPTH>(sums, row, quarter * 4);
    float y[4] = {x.x, x.y, x.z, x.w}, z[4] = {loaded[0].x, loaded[0].y, loaded[0].z, loaded[0].w};
    float sum = 0.f, squares = 0.f, scaled[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int channel = quarter * 4 + i;
      z[i] += constants[0][channel] * (y[i] + constants[2][channel]);
      sum += z[i], squares += z[i] * z[i];
      scaled[i] = z[i] * constants[1][channel];
    }
    i64 at = (i64)(group * CHUNK + row) * DIM + column + quarter * 4;
    *reinterpret_cast<float4*>(a.hidden + at) = make_float4(z[0], z[1], z[2], z[3]);
    *reinterpret_cast<uint2*>(a.out + at) = make_uint2(pack(scaled[0], scaled[1]), pack(scaled[2], scaled[3]));
    u32 lanes = row < CHUNK / 8 * 8 ? ~0u : (1u << CHUNK % 8 * 4) - 1;
    for (int offset = 1; offset < 4; offset *= 2) {
      sum += __shfl_xor_sync(lanes, sum, offset);
      squares += __shfl_xor_sync(lanes, squares, offset);
    }
    if (quarter == 0) {
      float* to = a.out_sums + (i64)(group * CHUNK + row) * TILES + blockIdx.x;
      to[0] = sum;
      to[(i64)a.padded * TILES] = squares;
    }
  } else {
    if (row < (CHUNK + 7) / 8 * 8) {  // whole warps
      float sum = 0.f, squares = 0.f;
      if (row < CHUNK) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float4 x = loaded[i], y = loaded[LOADS - 4 + i];
          sum += x.x + x.y + (x.z + x.w), squares += y.x + y.y + (y.z + y.w);
        }
      }
      for (int offset = 1; offset < 4; offset *= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        squares += __shfl_xor_sync(~0u, squares, offset);
      }
      float mean = sum / DIM;
      if (row < CHUNK && quarter == 0)
        norms[row] = make_float2(mean, rsqrtf(fmaxf(squares / DIM - mean * mean, 0.f) + EPS));
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * QUADS; i += THREADS) {
      int frame = i / QUADS, quad = i % QUADS * 4, channel = column + quad;
      float4 sum = add_shares<COLUMNS, DEPTH>(sums, frame, quad);
      float x[4] = {sum.x, sum.y, sum.z, sum.w};
      float2 norm = norms[frame];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[j] = norm.y * (x[j] - norm.x * constants[0][quad + j]) + constants[1][quad + j];
        if (KIND == FF_IN) x[j] = gelu(x[j]);
      }
      bf16* to;
      if (KIND == FF_IN) {
        to = a.out + (i64)(group * CHUNK + frame) * INNER + channel;
      } else {
        to = place_of(a, group, frame, channel, count, page);
        if (channel / DIM < 2 && channel % DIM < WIDTH) {
          const float* at = a.rope + (i64)min(start + frame, a.positions - 1) * (WIDTH / 2) + channel % WIDTH / 2;
          float2 cosine = *reinterpret_cast<const float2*>(at);
          float2 sine = *reinterpret_cast<const float2*>(at + (i64)a.positions * (WIDTH / 2));
          float4 y = make_float4(x[0], x[1], x[2], x[3]);
          x[0] = y.x * cosine.x - y.y * sine.x, x[1] = y.y * cosine.x + y.x * sine.x;
          x[2] = y.z * cosine.y - y.w * sine.y, x[3] = y.w * cosine.y + y.z * sine.y;
        }
      }
      if (KIND == FF_IN || to != nullptr) *reinterpret_cast<uint2*>(to) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
    }
  }
}

#define PRODUCT(name, kind, columns, depth, ahead)                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ Arguments a) { \
    product<kind, columns, depth, ahead>(a);                                                       \
  }
PRODUCT(qkv, QKV, 48, DIM, 3)
PRODUCT(ff_in, FF_IN, 32, DIM, 4)
PRODUCT(add_attention, ADD, 16, DIM, 4)
PRODUCT(add_ff, ADD, 16, INNER, 5)

// ---- attention: a block makes 16 frames of a head; each warp has its own tiles of 16 keys

constexpr int KEYS = 16, TILE_BYTES = 2 * KEYS * WIDTH * 2, SLOTS = 31;  // keys and values in shared memory
constexpr int PART_STRIDE = WIDTH + 4;

__device__ __forceinline__ u32 key_piece(int row, int piece) { return row * 128 + (piece ^ row % 2 * 4) * 16; }
__device__ __forceinline__ u32 value_piece(int row, int piece) { return row * 128 + (piece ^ row % 8 / 2 * 2) * 16; }

struct Softmax {
  float out[8][4], top[2], weight[2];  // a thread's two frames; its share of their weights
};

// Turns scores of T tiles into shares; `length` keys count, from the tile's first on.
template <int T> __device__ __forceinline__ void weigh(Softmax& s, float (&score)[T][2][4], float scale, int length) {
  int key = threadIdx.x % 4 * 2;
  float higher[2] = {s.top[0], s.top[1]};
#pragma unroll
  for (int t = 0; t < T; t++)
    for (int n = 0; n < 2; n++)
      for (int i = 0; i < 4; i++) {
        score[t][n][i] = T > 1 || key + n * 8 + i % 2 < length ? score[t][n][i] * scale : -infinity();
        higher[i / 2] = fmaxf(higher[i / 2], score[t][n][i]);
      }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 1));
    higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 2));
    float shrink = power2(s.top[h] - higher[h]);
    s.weight[h] *= shrink;
    for (int j = 0; j < 8; j++) s.out[j][h * 2] *= shrink, s.out[j][h * 2 + 1] *= shrink;
    s.top[h] = higher[h];
  }
#pragma unroll
  for (int t = 0; t < T; t++)
    for (int n = 0; n < 2; n++)
      for (int i = 0; i < 4; i++) {
        score[t][n][i] = power2(score[t][n][i] - s.top[i / 2]);
        s.weight[i / 2] += score[t][n][i];
      }
}

// Adds the values of a tile; of each, a thread has eight channels of keys 2t, 2t + 1, 2t + 8, 2t + 9.
__device__ __forceinline__ void mix(Softmax& s, const float (&share)[2][4], const uint4 (&value)[4]) {
  u32 p[4] = {pack(share[0][0], share[0][1]), pack(share[0][2], share[0][3]), pack(share[1][0], share[1][1]),
              pack(share[1][2], share[1][3])};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = j / 2 == 0 ? value[i].x : j / 2 == 1 ? value[i].y : j / 2 == 2 ? value[i].z : value[i].w;
    u32 pick = j % 2 ? 0x7632 : 0x5410;
    multiply(s.out[j], p[0], p[1], p[2], p[3], __byte_perm(v[0], v[1], pick), __byte_perm(v[2], v[3], pick));
  }
}

template <int T>
__device__ __forceinline__ void attend(Softmax& s, const uint4 (&q)[2][2], u32 tile, float scale) {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float score[T][2][4];
#pragma unroll
  for (int i = 0; i < T; i++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      for (int j = 0; j < 4; j++) score[i][n][j] = 0.f;
      for (int k = 0; k < 2; k++)
        multiply32(score[i][n], q[k][0], q[k][1],
                   load_shared(tile + i * WARPS * TILE_BYTES + key_piece(n * 8 + g, k * 4 + t)));
    }
  weigh<T>(s, score, scale, KEYS);
#pragma unroll
  for (int i = 0; i < T; i++) {
    uint4 value[4];
    for (int j = 0; j < 4; j++)
      value[j] = load_shared(tile + i * WARPS * TILE_BYTES + TILE_BYTES / 2 + value_piece(j / 2 * 8 + t * 2 + j % 2, g));
    mix(s, score[i], value);
  }
}

struct Keys {
  const bf16* arena;
  const i64* pages;
  i64 inner;
  int length;
  __device__ __forceinline__ const bf16* at(int key) const {
    key = min(key, length - 1);
    return arena + pages[key / CHUNK] + inner + key % CHUNK * WIDTH;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention(
    const bf16* query, bf16* mixed, const bf16* arena, const int* starts, const int* counts, const int* steps,
    const i64* table, i64 layer_offset, i64 step_stride, int table_stride, float scale) {
  constexpr int VALUES = HEADS * CHUNK * WIDTH;  // from a key to its values
  __shared__ float tops[WARPS][16], weights[WARPS][16];
  if (TRIGGER_ATTENTION == 0) let_next_start();
  u32 memory = shared_address(memory_of_block);
  int tile_of_frames = blockIdx.x % 4 * 16, head = blockIdx.x / 4 % HEADS, group = blockIdx.x / (4 * HEADS);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int start = starts[group], length = start + counts[group];
  Keys keys = {arena, table + (i64)group * table_stride, steps[0] * step_stride + layer_offset + head * (CHUNK * WIDTH), length};
  // Keys of earlier chunks do not depend on the kernel ahead.
  int kept = min(start / KEYS, SLOTS), tiles = (length + KEYS - 1) / KEYS;
  for (int tile = warp; tile < kept; tile += WARPS) {
    u32 to = memory + tile * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = i * 4 + lane / 8, piece = lane % 8;
      const bf16* from = keys.at(tile * KEYS + row) + piece * 8;
      copy_async(to + key_piece(row, piece), from);
      copy_async(to + TILE_BYTES / 2 + value_piece(row, piece), from + VALUES);
    }
  }
  int tile = kept + (warp + WARPS - kept % WARPS) % WARPS;  // the warp's first that comes late
  const bf16 *key_at[2], *value_at[4];
  auto point = [&] {
    for (int n = 0; n < 2; n++) key_at[n] = keys.at(tile * KEYS + n * 8 + g) + t * 8;
    for (int i = 0; i < 4; i++) value_at[i] = keys.at(tile * KEYS + i / 2 * 8 + t * 2 + i % 2) + VALUES + g * 8;
  };
  point();
  wait_for_previous();
  uint4 q[2][2], key[2][2], value[4];
  for (int h = 0; h < 2; h++) {
    int frame = min(tile_of_frames + h * 8 + g, CHUNK - 1);
    for (int k = 0; k < 2; k++) q[k][h] = load_new(query + (i64)(group * CHUNK + frame) * DIM + head * WIDTH + k * 32 + t * 8);
  }
  auto load_keys = [&] {
    for (int n = 0; n < 2; n++) for (int k = 0; k < 2; k++) key[n][k] = load_new(key_at[n] + k * 32);
  };
  auto load_values = [&] { for (int i = 0; i < 4; i++) value[i] = load_new(value_at[i]); };
  if (tile < tiles) load_keys(), load_values();
  if (TRIGGER_ATTENTION == 1) let_next_start();
  Softmax s;
  for (int j = 0; j < 8; j++) for (int i = 0; i < 4; i++) s.out[j][i] = 0.f;
  for (int h = 0; h < 2; h++) s.top[h] = -infinity(), s.weight[h] = 0.f;
  wait_copies();
  __syncwarp();
  int early = warp;
  for (; early + WARPS < kept; early += 2 * WARPS) attend<2>(s, q, memory + early * TILE_BYTES, scale);
  if (early < kept) attend<1>(s, q, memory + early * TILE_BYTES, scale);
  while (tile < tiles) {
    float score[1][2][4];
    int left = length - tile * KEYS;
    for (int n = 0; n < 2; n++) {
      for (int j = 0; j < 4; j++) score[0][n][j] = 0.f;
      for (int k = 0; k < 2; k++) multiply32(score[0][n], q[k][0], q[k][1], key[n][k]);
    }
    tile += WARPS;
    bool more = tile < tiles;
    if (more) point(), load_keys();
    weigh<1>(s, score, scale, left);
    mix(s, score[0], value);
    if (more) load_values();
  }
  for (int h = 0; h < 2; h++) {
    s.weight[h] += __shfl_xor_sync(~0u, s.weight[h], 1);
    s.weight[h] += __shfl_xor_sync(~0u, s.weight[h], 2);
  }
  if (TRIGGER_ATTENTION == 2) let_next_start();
  __syncthreads();  // all have read their keys, whose memory now takes the parts
  float* parts = reinterpret_cast<float*>(memory_of_block);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = h * 8 + g;
    float4* to = reinterpret_cast<float4*>(parts + (warp * 16 + row) * PART_STRIDE + t * 16);
#pragma unroll
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++)
        to[i * 2 + j] = make_float4(s.out[j * 4][h * 2 + i], s.out[j * 4 + 1][h * 2 + i], s.out[j * 4 + 2][h * 2 + i],
                                    s.out[j * 4 + 3][h * 2 + i]);
    if (t == 0) tops[warp][row] = s.top[h], weights[warp][row] = s.weight[h];
  }
  __syncthreads();
  int row = threadIdx.x / 16, column = threadIdx.x % 16 * 4, frame = tile_of_frames + row;
  if (frame >= CHUNK) return;
  float highest = -infinity(), total = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, tops[w][row]);
  float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    float factor = power2(tops[w][row] - highest);
    float4 x = *reinterpret_cast<const float4*>(parts + (w * 16 + row) * PART_STRIDE + column);
    total += factor * weights[w][row];
    y.x += factor * x.x, y.y += factor * x.y, y.z += factor * x.z, y.w += factor * x.w;
  }
  float inverse = 1.f / total;
  *reinterpret_cast<uint2*>(mixed + (i64)(group * CHUNK + frame) * DIM + head * WIDTH + column) =
      make_uint2(pack(y.x * inverse, y.y * inverse), pack(y.z * inverse, y.w * inverse));
}
