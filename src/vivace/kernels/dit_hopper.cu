// Attention of the DiT's blocks for Hopper GPUs (compute capability 9.0), for launches of few groups.
//
// Arguments and results are those of dit_reference.py. A short kernel in a chain waits rather than computes. So this one
// lets the next one start at once, and fetches what does not depend on the kernel ahead (keys and values of earlier
// chunks) into shared memory before it waits. What comes late goes from memory straight into the registers of the one
// warp that needs it. That is the group's own chunk, and those of its stream that are ahead of it in the launch.
//
// A thread of a matrix operand holds eight neighbouring channels of its row, 16 bytes, where the instruction wants two
// times two pairs: the order of the summed channels does not matter, if it is the same in both operands.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int CHUNK = 50, WIDTH = 64, HEADS = 16, DIM = HEADS * WIDTH;
constexpr int WARPS = 8, THREADS = 256;

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
__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
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

// 32 channels.
__device__ __forceinline__ void multiply32(float (&d)[4], const uint4& a, const uint4& after, const uint4& b) {
  multiply(d, a.x, after.x, a.y, after.y, b.x, b.y);
  multiply(d, a.z, after.z, a.w, after.w, b.z, b.w);
}

// A block makes 16 frames of a head; each warp has its own tiles of 16 keys.

constexpr int KEYS = 16, TILE_BYTES = 2 * KEYS * WIDTH * 2;  // of keys and values in shared memory
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

extern __shared__ __align__(128) char memory_of_block[];

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
    const int* ahead, const i64* table, i64 layer_offset, i64 step_stride, int table_stride, int slots, float scale) {
  constexpr int VALUES = HEADS * CHUNK * WIDTH;  // from a key to its values
  __shared__ float tops[WARPS][16], weights[WARPS][16];
  let_next_start();
  u32 memory = shared_address(memory_of_block);
  int tile_of_frames = blockIdx.x % 4 * 16, head = blockIdx.x / 4 % HEADS, group = blockIdx.x / (4 * HEADS);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int start = starts[group], length = start + counts[group];
  i64 inner = steps[group] * step_stride + layer_offset + head * (CHUNK * WIDTH);
  Keys keys = {arena, table + (i64)group * table_stride, inner, length};
  // Keys of chunks of earlier launches do not depend on the kernel ahead.
  int kept = min((start - ahead[group] * CHUNK) / KEYS, slots), tiles = (length + KEYS - 1) / KEYS;
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
