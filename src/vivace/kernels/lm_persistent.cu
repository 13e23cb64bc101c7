// Decodes one row of the speech LM, several tokens per launch, in one kernel whose blocks stay resident.
//
// Every block owns a fixed share of the rows of every matrix. Its weights lie in one contiguous stream in the order
// in which it needs them, and one thread copies that stream into a ring in shared memory without ever waiting for
// the arithmetic, so that memory is busy across all phases. A layer has five phases; what a phase makes is
// exchanged through global memory in words of 8 bytes, 4 of data and 4 that name the layer and step (its epoch):
// whoever needs a word reads it until the epoch is right. No barrier between blocks is needed: every phase reads
// something from every block, so a word is never overwritten before all have read it.
//
//   1  norm, query-key-value rows, bias, rotation; keys and values into the paged cache
//   2  attention of one head over one part of the past
//   3  join the parts; output rows; residual
//   4  norm; gate and up rows
//   5  down rows; residual
//
// Behind the last layer: norm, head, and the sampling rule, which one block runs for all.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define WARPS (THREADS / 32)
#define SUMS 16                  // sums of a row in shared memory: one per warp
#define ROW_BYTES (HIDDEN * 2)
#define BLOCKS (HIDDEN / 32)     // of 32 columns
#define DOWN_BLOCKS (INTER / 32)
#define UNITS (INTER / 2)        // pairs of the MLP's inner numbers, one per word
#define QKV_PAIRS ((HEADS + 2 * KV_HEADS) * 32)
#define GROUP (HEADS / KV_HEADS)
#define GATE_TILES ((4 * ((UNITS + GRID - 1) / GRID) + 15) / 16)
#define HEAD_TILES ((2 * ((VOCAB_PAIRS + GRID - 1) / GRID) + 15) / 16)
#define MOST_TILES (GATE_TILES > HEAD_TILES ? GATE_TILES : HEAD_TILES)
#define BIAS_BYTES 32
#define RING_BYTES (STAGES * CHUNK)
#define PART_WORDS 64            // 32 pairs of numbers, each beside the part's log sum
#define H_LOADS ((UNITS / 2 + THREADS - 1) / THREADS)
#define VPT ((VOCAB + THREADS - 1) / THREADS)
#define CANDIDATES 512
#define RECENT 64
#define FULL 0xffffffffu
#ifndef FLIGHT
#define FLIGHT 4                 // chunks of weights under way: more would delay what the blocks exchange
#endif
#ifndef AHEAD
#define AHEAD 1                  // keys and values per group of lanes that are asked for before the query is there
#endif

struct Args {
  const char* weights;      // [GRID, block_bytes]
  const u16* speech;        // [VOCAB, HIDDEN]
  const float2* rotary;     // [positions, 32]
  u16* pool;                // [LAYERS, 2, num_pages, KV_HEADS, PAGE, 64]
  const int* table;         // the row's pages
  u64* words;               // what blocks exchange, see WORDS_*
  u32* epoch;
  int* token; int* length; long long* place; const long long* min_place; const int* kind; const long long* seed;
  const float* top_p; const int* top_k; const int* win_size; const double* tau_r; const float* temperature;
  int* recent; int* decoded; int* stop; int* remaining; int* out; int* out_count;
  int* host;                // mapped host memory: count, stop, tokens …; may be null
  long long* stamps;        // clock per block, layer and phase, with -DPROFILE
  long long num_pages; long long block_bytes;
  int table_len; int out_capacity; int num_steps;
};

#define WORDS_XO 0
#define WORDS_XD (WORDS_XO + HIDDEN)
#define WORDS_QKV (WORDS_XD + HIDDEN)
#define WORDS_PARTS (WORDS_QKV + QKV_PAIRS * 2)
#define WORDS_H (WORDS_PARTS + SPLITS * HEADS * PART_WORDS)
#define WORDS_LOGITS (WORDS_H + UNITS)
#define WORDS_TOKEN (WORDS_LOGITS + ((VOCAB + 1) / 2) * 2)

// For measurements alone, each by -D: PROFILE notes clocks; NOPOLL does not wait for other blocks and NOSTREAM copies no
// weights, so that their results are wrong and their times tell what waiting and copying cost.
#ifdef PROFILE
#define STAMP(i) if (t == 0) a.stamps[((u64)b * LAYERS + layer) * 12 + i] = clock64()
#else
#define STAMP(i)
#endif

struct __align__(128) Shared {
  char ring[RING_BYTES];
  __align__(16) u32 x[3][HIDDEN / 2];  // in bfloat16: the number, what that left, what that left
  __align__(16) u32 h[UNITS > 1280 ? UNITS : 1280];
  __align__(16) float partial[MOST_TILES * 16 * SUMS];
  __align__(16) float squares[SUMS];
  float merge[WARPS * 66];
  float own[8];
  int pages[MAX_PAGES];
  int recent[RECENT];
  u64 full[STAGES];
  volatile u32 consumed;
  volatile int quit;
  volatile int next_token;
  // The sampler's; its lists of candidates lie in h, which is free then.
  u32 threshold; u32 count; int again; int picked; int bad;
  double scan[WARPS];
};

extern __shared__ __align__(128) char raw_shared[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(raw_shared); }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pair_of(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ void put(u64* word, u32 value, u32 epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(((u64)epoch << 32) | value) : "memory");
}
__device__ __forceinline__ u64 peek(const u64* word) {
  u64 both;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(word) : "memory");
  return both;
}
__device__ __forceinline__ void peek2(const u64* word, u64& a, u64& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(word) : "memory");
}
#ifdef NOPOLL
__device__ __forceinline__ bool is_new(u64 both, u32 epoch) { return true; }
#else
__device__ __forceinline__ bool is_new(u64 both, u32 epoch) { return (u32)(both >> 32) == epoch; }
#endif

// Eight words at once, as numbers.
__device__ __forceinline__ void take8(const u64* words, u32 epoch, float (&y)[8]) {
  for (bool waiting = true; waiting;) {
    waiting = false;
    u64 a[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) peek2(words + i, a[i], a[i + 1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      waiting |= !is_new(a[i], epoch);
      y[i] = __uint_as_float((u32)a[i]);
    }
  }
}

__device__ __forceinline__ void wait_full(u32 chunk) {
#ifndef NOSTREAM
  u32 bar = shared_address(&shared().full[chunk % STAGES]), parity = (chunk / STAGES) & 1u, done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  }
#endif
}
// Until so many bytes of a step's stream are in the ring.
__device__ __noinline__ void wait_bytes(u32 first_chunk, u32 offset, u32 bytes) {
  const u32 last = first_chunk + (offset + bytes - 1) / CHUNK;
  for (u32 chunk = first_chunk + offset / CHUNK; chunk <= last; ++chunk) wait_full(chunk);
}

// One thread: the block's stream into the ring, as far as there is room.
__device__ __noinline__ void produce(const char* source, u32 step_chunks, u32 num_steps) {
  Shared& s = shared();
  u32 total = step_chunks * num_steps, k = 0, in_step = 0;
  u64 policy;  // weights pass through the L2 once per step; what blocks exchange must stay there
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#ifdef NOSTREAM
  while (!s.quit) {}
  return;
#endif
  for (; k < total; ++k) {
    while ((int)(k - s.consumed) >= STAGES)
      if (s.quit) goto drain;
    if (k >= FLIGHT) wait_full(k - FLIGHT);
    const u32 slot = k % STAGES, bar = shared_address(&s.full[slot]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"((u32)CHUNK) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(s.ring + slot * CHUNK)),
        "l"(source + (u64)in_step * CHUNK), "r"((u32)CHUNK), "r"(bar), "l"(policy) : "memory");
    if (++in_step == step_chunks) in_step = 0;
  }
drain:
  while (!s.quit) {}
  for (u32 j = s.consumed; (int)(k - j) > 0; ++j) wait_full(j);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
  return v;
}

// The t-th word of what begins at base.
__device__ __forceinline__ u32 ring_word(u32 base, u32 t) {
  u32 at = base + t * 4;
  if (at >= RING_BYTES) at -= RING_BYTES;
  return *reinterpret_cast<const u32*>(raw_shared + at);
}

// Two neighbours of a vector, each as a sum of three bfloat16 numbers: float32 but for the last bit.
__device__ __forceinline__ void store_x(int t, float a, float b) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 both = pair_of(a, b);
    shared().x[i][t] = both;
    a -= low(both); b -= high(both);
  }
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Rows in the ring times a vector: this warp's share of the columns, sums per row and warp into s.partial.
// The rows lie in blocks of 32 columns, in a block row after row. A lane's 16 bytes of a row are its elements of two
// products of 16 columns; the order of columns within 32 is the same for the vector. A product's columns are the parts
// of the vector. Rows beyond the last read what follows; nobody looks at their sums.
template <int TILES, bool IS_HALF>
__device__ __noinline__ void rows_times(u32 base, int rows, u32 x_offset, int num_parts, int num_blocks) {
  Shared& s = shared();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int per_warp = (num_blocks + WARPS - 1) / WARPS;
  const int from = min(warp * per_warp, num_blocks), to = min(from + per_warp, num_blocks);
  float c[TILES][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[tile][i] = 0.f;
  u32 at = base + (u32)(from * rows + g) * 64 + q * 16;
  while (at >= RING_BYTES) at -= RING_BYTES;
  const char* x = raw_shared + x_offset + g * (HIDDEN * 2) + q * 16;
#pragma unroll 1
  for (int block = from; block < to; ++block) {
    uint4 xv = make_uint4(0, 0, 0, 0);
    if (g < num_parts) xv = *reinterpret_cast<const uint4*>(x + block * 64);
    u32 tile_at = at;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 w0 = *reinterpret_cast<const uint4*>(raw_shared + tile_at);
      tile_at += 512; if (tile_at >= RING_BYTES) tile_at -= RING_BYTES;
      uint4 w1 = make_uint4(0, 0, 0, 0);
      if (!IS_HALF) {
        w1 = *reinterpret_cast<const uint4*>(raw_shared + tile_at);
        tile_at += 512; if (tile_at >= RING_BYTES) tile_at -= RING_BYTES;
      }
      multiply(c[tile], w0.x, w1.x, w0.y, w1.y, xv.x, xv.y);
      multiply(c[tile], w0.z, w1.z, w0.w, w1.w, xv.z, xv.w);
    }
    at += rows * 64; if (at >= RING_BYTES) at -= RING_BYTES;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float upper = c[tile][0] + c[tile][1], lower = c[tile][2] + c[tile][3];
    upper += __shfl_xor_sync(FULL, upper, 1);
    if (!IS_HALF) lower += __shfl_xor_sync(FULL, lower, 1);
    if (q == 0) {
      s.partial[(tile * 16 + g) * SUMS + warp] = upper;
      if (!IS_HALF) s.partial[(tile * 16 + g + 8) * SUMS + warp] = lower;
    }
  }
}

__device__ __forceinline__ float sum16(const float* values) {
  float4 a = *reinterpret_cast<const float4*>(values), b = *reinterpret_cast<const float4*>(values + 4);
  float4 c = *reinterpret_cast<const float4*>(values + 8), d = *reinterpret_cast<const float4*>(values + 12);
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)) + (((c.x + c.y) + (c.z + c.w)) + ((d.x + d.y) + (d.z + d.w)));
}
// All warps' sums of a row; the entries of warps that there are not are zero.
__device__ __forceinline__ float row_sum(int row) { return sum16(shared().partial + row * SUMS); }
// 1 / root mean square of what take_normed took; may be asked for until the next phase takes.
__device__ __forceinline__ float norm_scale() { return rsqrtf(sum16(shared().squares) * (1.f / HIDDEN) + EPS); }

// x of all blocks, times the norm's weights (in the ring at norm), into shared memory.
__device__ __noinline__ void take_normed(const u64* words, u32 epoch, u32 norm) {
  const int t = threadIdx.x;
  float squares = 0.f;
  if (t < HIDDEN / 2) {
    const u32 w = ring_word(norm, t);
    u64 a, b;
    do peek2(words + 2 * t, a, b); while (!is_new(a, epoch) || !is_new(b, epoch));
    const float x0 = __uint_as_float((u32)a), x1 = __uint_as_float((u32)b);
    store_x(t, x0 * low(w), x1 * high(w));
    squares = x0 * x0 + x1 * x1;
  }
  squares = warp_sum(squares);
  if ((t & 31) == 0) shared().squares[t >> 5] = squares;
  sync_workers();
}

__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ double uniform(long long seed, long long place, u64 draw) {
  u64 state = mix((u64)seed + 0x9E3779B97F4A7C15ull);
  state = mix(state + ((u64)place + 1) * 0xD1342543DE82EF95ull);
  state = mix(state + (draw + 1) * 0xAF251AF3B0F025B5ull);
  return (double)(state >> 16) * 0x1p-48;
}

__device__ __forceinline__ bool is_allowed(int id, int kind) {
  return id < SPEECH || kind == 0 || (kind == 2 && id == SPEECH + 3) || (kind == 3 && id == SPEECH + 1);
}

__device__ float block_max(float v, int t) {
  Shared& s = shared();
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
  sync_workers();
  if ((t & 31) == 0) s.squares[t >> 5] = v;
  sync_workers();
  float most = s.squares[0];
  for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.squares[w]);
  return most;
}
__device__ float block_sum(float v, int t) {
  Shared& s = shared();
  v = warp_sum(v);
  sync_workers();
  if ((t & 31) == 0) s.squares[t >> 5] = v;
  sync_workers();
  float sum = 0.f;
  for (int w = 0; w < WARPS; ++w) sum += s.squares[w];
  return sum;
}

// How the row draws; read once per launch.
struct Rule {
  long long min_place, seed; double tau_r; float top_p, temperature; int kind, top_k, win_size;
};

// The model's rule over the logits of this step. All workers of one block; returns the token, -1 if not finite.
__device__ __noinline__ int sample(const Args& a, const Rule& rule, u32 epoch, long long place, int decoded, int t) {
  Shared& s = shared();
  const u64* logits = a.words + WORDS_LOGITS;
  const int kind = place < rule.min_place ? 1 : rule.kind, lane = t & 31;
  const float temperature = rule.temperature;
  bool greedy = temperature <= 0.f;
  float v[VPT];
  bool bad = false;
  float most = (-INFINITY);
  if (t == 0) { s.count = 0; s.bad = 0; }
  for (bool waiting = true; waiting;) {
    waiting = false;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int id = min(t + j * THREADS, VOCAB - 1);
      const u64 word = peek(logits + id);
      waiting |= !is_new(word, epoch);
      v[j] = __uint_as_float((u32)word);
    }
  }
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    const int id = t + j * THREADS;
    if (id >= VOCAB || !is_allowed(id, kind)) v[j] = (-INFINITY);
    bad |= !(v[j] < INFINITY);
    most = fmaxf(most, v[j]);
  }
  most = block_max(most, t);
  if (bad) s.bad = 1;
  sync_workers();
  if (s.bad || most == (-INFINITY)) return -1;
  float sum = 0.f;
  u32 top = 0;
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    float score = v[j] - most;
    if (!greedy && temperature != 1.f) score = score / temperature;
    v[j] = expf(score);
    sum += v[j];
  }
  sum = block_sum(sum, t);
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    v[j] = v[j] / sum;
    top = max(top, __float_as_uint(v[j]));
  }
  // Every one of the k likeliest lies at or above the k-th largest of the threads' own maxima.
  int k = greedy ? 1 : min(rule.top_k, RECENT);
  u32* maxima = s.h;
  maxima[t] = top;
  sync_workers();
  if (t < 32) {
    u32 mine[WARPS], threshold = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) mine[w] = maxima[w * 32 + lane];
    for (int bit = 29; bit >= 0; --bit) {
      u32 trial = threshold | (1u << bit);
      int above = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) above += mine[w] >= trial;
      if (__reduce_add_sync(FULL, above) >= k) threshold = trial;
    }
    if (lane == 0) s.threshold = max(threshold, 1u);
  }
  sync_workers();
  u64* keys = reinterpret_cast<u64*>(s.h);
  u64* sorted = keys + CANDIDATES;
  u32 threshold = s.threshold;
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    u32 key = __float_as_uint(v[j]);
    if (key >= threshold) {
      u32 at = atomicAdd(&s.count, 1u);
      if (at < CANDIDATES) keys[at] = ((u64)key << 32) | (0xffffffffu - (u32)(t + j * THREADS));
    }
  }
  sync_workers();
  int n = s.count;
  if (n <= CANDIDATES) {
    if (t < n) {
      u64 mine = keys[t];
      int rank = 0;
      for (int j = 0; j < n; ++j) rank += keys[j] > mine;
      if (rank < RECENT) sorted[rank] = mine;
    }
    n = min(n, k);
  } else {  // very many equal probabilities: one after the other
    for (int i = 0; i < k; ++i) {
      u64 best = 0, last = i ? sorted[i - 1] : ~0ull;
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        u64 key = ((u64)__float_as_uint(v[j]) << 32) | (0xffffffffu - (u32)(t + j * THREADS));
        if (t + j * THREADS < VOCAB && key < last && key > best) best = key;
      }
      for (int d = 16; d; d >>= 1) best = max(best, __shfl_xor_sync(FULL, best, d));
      sync_workers();
      if (lane == 0) keys[t >> 5] = best;
      sync_workers();
      if (t == 0) {
        for (int w = 1; w < WARPS; ++w) keys[0] = max(keys[0], keys[w]);
        sorted[i] = keys[0];
      }
      sync_workers();
    }
    n = k;
  }
  sync_workers();
  if (t < 32) {
    float p[2], running[2];
    double cumulative[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane + 32 * half;
      p[half] = i < n ? __uint_as_float((u32)(sorted[i] >> 32)) : 0.f;
      running[half] = p[half];
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const float other = __shfl_up_sync(FULL, running[half], d);
        if (lane >= d) running[half] += other;
      }
    }
    running[1] += __shfl_sync(FULL, running[0], 31);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool kept = lane + 32 * half == 0 || running[half] - p[half] < rule.top_p;
      cumulative[half] = kept ? (double)p[half] : 0.0;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const double other = __shfl_up_sync(FULL, cumulative[half], d);
        if (lane >= d) cumulative[half] += other;
      }
    }
    cumulative[1] += __shfl_sync(FULL, cumulative[0], 31);
    const double target = uniform(rule.seed, place, 0) * __shfl_sync(FULL, cumulative[1], 31);
    int index = __popc(__ballot_sync(FULL, lane < n && cumulative[0] <= target))
        + __popc(__ballot_sync(FULL, lane + 32 < n && cumulative[1] <= target));
    index = greedy ? 0 : min(index, n - 1);
    const int first = (int)(0xffffffffu - (u32)sorted[index]);
    const int window = min(rule.win_size, min(decoded, RECENT));
    int repeats = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int age = lane + 1 + 32 * half;
      const bool same = age <= window && s.recent[(decoded - age) & (RECENT - 1)] == first;
      repeats += __popc(__ballot_sync(FULL, same));
    }
    if (lane == 0) {
      s.picked = first;
      s.again = !greedy && rule.win_size > 0 && (double)repeats >= (double)rule.win_size * rule.tau_r;
    }
  }
  sync_workers();
  if (!s.again) return s.picked;
  // Once more, from all the others: in the order of ids, a run of ids per thread.
  int first = s.picked;
  float rest = (-INFINITY);
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    int id = t * VPT + j;
    v[j] = id < VOCAB && id != first && is_allowed(id, kind) ? __uint_as_float((u32)peek(logits + id)) : (-INFINITY);
    if (temperature != 1.f) v[j] = (v[j] - most) / temperature;
    rest = fmaxf(rest, v[j]);
  }
  rest = block_max(rest, t);
  if (rest == (-INFINITY)) return first;
  sum = 0.f;
#pragma unroll
  for (int j = 0; j < VPT; ++j) sum += v[j] = expf(v[j] - rest);
  sum = block_sum(sum, t);
  double mine = 0.0;
#pragma unroll
  for (int j = 0; j < VPT; ++j) mine += (double)(v[j] / sum);
  double before = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    double other = __shfl_up_sync(FULL, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) s.scan[t >> 5] = before;
  if (t == 0) s.picked = VOCAB - 1;
  sync_workers();
  double total = 0.0, start = 0.0;
  for (int w = 0; w < WARPS; ++w) {
    if (w == (t >> 5)) start = total;
    total += s.scan[w];
  }
  double running = start + before - mine, target = uniform(rule.seed, place, 1) * total;
  if (running <= target && target < running + mine) {
    int j = 0;
    for (; j < VPT; ++j) {
      running += (double)(v[j] / sum);
      if (running > target) break;
    }
    s.picked = min(t * VPT + min(j, VPT - 1), VOCAB - 1);
  }
  sync_workers();
  return s.picked;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode(const Args a) {
  Shared& s = shared();
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, b = blockIdx.x;
  const int left = min(*a.remaining, a.num_steps);
  if (*a.stop != 0 || left <= 0) return;

  if (t == 0) {
    for (int i = 0; i < STAGES; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    s.consumed = 0;
    s.quit = 0;
  }
  for (int i = t; i < a.table_len; i += THREADS + 32) s.pages[i] = a.table[i];
  for (int i = t; i < MOST_TILES * 16 * SUMS; i += THREADS + 32) s.partial[i] = 0.f;
  if (t < SUMS) s.squares[t] = 0.f;
  if (t < RECENT) s.recent[t] = a.recent[t];
  __syncthreads();

  // The block's share of every matrix.
  const int p0 = b * QKV_PAIRS / GRID, qkv_rows = 2 * ((b + 1) * QKV_PAIRS / GRID - p0);
  const int r0 = b * HIDDEN / GRID, rows = (b + 1) * HIDDEN / GRID - r0;
  const int u0 = b * UNITS / GRID, gate_rows = 4 * ((b + 1) * UNITS / GRID - u0);
  const int v0 = b * VOCAB_PAIRS / GRID, head_rows = 2 * ((b + 1) * VOCAB_PAIRS / GRID - v0);
  // Offsets in a layer's stream: norm, bias, query-key-value rows, output rows, norm, gate and up rows, down rows.
  const u32 at_qkv = ROW_BYTES + BIAS_BYTES, at_out = at_qkv + qkv_rows * ROW_BYTES;
  const u32 at_norm = at_out + rows * ROW_BYTES, at_gate = at_norm + ROW_BYTES;
  const u32 at_down = at_gate + gate_rows * ROW_BYTES, layer_bytes = at_down + rows * (INTER * 2);
  const u32 step_chunks = (LAYERS * layer_bytes + ROW_BYTES + head_rows * ROW_BYTES + CHUNK - 1) / CHUNK;
  if (warp == WARPS) {
    if (lane == 0) produce(a.weights + (u64)b * a.block_bytes, step_chunks, left);
    return;
  }
  const u32 x_offset = shared_address(&s.x[0][0]) - shared_address(raw_shared);
  const u32 h_offset = shared_address(&s.h[0]) - shared_address(raw_shared);

  u32 epoch = *a.epoch, chunk0 = 0;
  int token = *a.token, position = *a.length, decoded = *a.decoded;
  long long place = *a.place;
  const Rule rule = {*a.min_place, *a.seed, *a.tau_r, *a.top_p, *a.temperature, *a.kind, *a.top_k, *a.win_size};
  const u64 page_stride = (u64)KV_HEADS * PAGE * 64, to_values = a.num_pages * page_stride;

  for (int step = 0;; ++step) {
    const int length = position + 1;
    const int splits = min(SPLITS, (length + AHEAD * 4 * WARPS - 1) / (AHEAD * 4 * WARPS));
    const int per = (length + splits - 1) / splits;
    const int head = b % HEADS, split = b / HEADS, from = split * per, to = min(length, from + per);
    const bool attends = split < splits;
    const int mine = from + warp * 4 + (lane >> 3), dims = (lane & 7) * 8;
    float e0 = 0.f, e1 = 0.f;
    if (t < HIDDEN / 2) {
      const u32 e = *reinterpret_cast<const u32*>(a.speech + (u64)token * HIDDEN + 2 * t);
      e0 = low(e); e1 = high(e);
      const int own = 2 * t - r0;  // rows that this block owns start its residual
      if (own >= 0 && own < rows) s.own[own] = e0;
      if (own + 1 >= 0 && own + 1 < rows) s.own[own + 1] = e1;
    }
    const float squares = warp_sum(e0 * e0 + e1 * e1);
    if (lane == 0) s.squares[warp] = squares;
    // Of the query-key-value row that this thread finishes.
    const int pair = p0 + (t >> 1), which = pair / 32, row_dim = pair % 32 + 32 * (t & 1);
    float2 turn = make_float2(1.f, 0.f);
    if (t < qkv_rows && which < HEADS + KV_HEADS) turn = a.rotary[(u64)position * 32 + pair % 32];
    u16* cache = a.pool;

#pragma unroll 1
    for (int layer = 0; layer < LAYERS; ++layer, cache += 2 * to_values) {
      ++epoch;
      const u32 offset = layer * layer_bytes;
      u32 base = (chunk0 % STAGES) * CHUNK + offset % RING_BYTES;
      if (base >= RING_BYTES) base -= RING_BYTES;

      // -- phase 1. What does not wait for others is asked for first.
      STAMP(0);
      uint4 keys[AHEAD], values[AHEAD];
      const u16* const past = cache + (u64)(head / GROUP) * PAGE * 64 + dims;
      auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int at_position = first + i * 4 * WARPS;
          keys[i] = values[i] = make_uint4(0, 0, 0, 0);
          if (at_position < to && at_position < position) {
            const u16* at = past + s.pages[at_position / PAGE] * page_stride + (at_position % PAGE) * 64;
            asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                : "=r"(keys[i].x), "=r"(keys[i].y), "=r"(keys[i].z), "=r"(keys[i].w) : "l"(at));
            asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                : "=r"(values[i].x), "=r"(values[i].y), "=r"(values[i].z), "=r"(values[i].w) : "l"(at + to_values));
          }
        }
      };
      if (attends) load(mine);
      wait_bytes(chunk0, offset, at_out);
      if (layer) take_normed(a.words + WORDS_XD, epoch - 1, base);
      else {
        const u32 w = ring_word(base, min(t, HIDDEN / 2 - 1));
        if (t < HIDDEN / 2) store_x(t, e0 * low(w), e1 * high(w));
        sync_workers();
      }
      STAMP(1);
      rows_times<1, false>(base + at_qkv, qkv_rows, x_offset, 3, BLOCKS);
      sync_workers();
      if (t < 32) {
        const u32 bias = ring_word(base, ROW_BYTES / 4 + min(t >> 1, BIAS_BYTES / 4 - 1));
        float y = fmaf(row_sum(t & 15), norm_scale(), t & 1 ? high(bias) : low(bias));
        const float other = __shfl_xor_sync(FULL, y, 1);
        y = t & 1 ? y * turn.x + other * turn.y : y * turn.x - other * turn.y;
        if (t < qkv_rows) {
          if (which < HEADS) y *= 0.125f;
          else {
            const u32 half = pair_of(y, 0.f) & 0xffffu;
            y = low(half);
            const int kv = (which - HEADS) % KV_HEADS;
            cache[(which >= HEADS + KV_HEADS ? to_values : 0) + s.pages[position / PAGE] * page_stride
                  + (u64)(kv * PAGE + position % PAGE) * 64 + row_dim] = (u16)half;
          }
          put(a.words + WORDS_QKV + which * 64 + row_dim, __float_as_uint(y), epoch);
        }
      }

      // -- phase 2
      STAMP(2);
      if (attends) {
        float q[8], m = -INFINITY, l = 0.f, acc[8];
        take8(a.words + WORDS_QKV + head * 64 + dims, epoch, q);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = 0.f;
#pragma unroll 1
        for (int first = mine; first - (lane >> 3) < to; first += AHEAD * 4 * WARPS) {
          if (first != mine) load(first);
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            const int at_position = first + i * 4 * WARPS;
            if (at_position == position) {  // made in this step, rounded as it is in the cache
              const u64* made = a.words + WORDS_QKV + (HEADS + head / GROUP) * 64 + dims;
              float k[8];
              take8(made, epoch, k);
              keys[i] = make_uint4(pair_of(k[0], k[1]), pair_of(k[2], k[3]), pair_of(k[4], k[5]), pair_of(k[6], k[7]));
              take8(made + KV_HEADS * 64, epoch, k);
              values[i] = make_uint4(pair_of(k[0], k[1]), pair_of(k[2], k[3]), pair_of(k[4], k[5]), pair_of(k[6], k[7]));
            }
            __syncwarp();
            float dot = q[0] * low(keys[i].x), more = q[1] * high(keys[i].x);
            dot = fmaf(q[2], low(keys[i].y), dot); more = fmaf(q[3], high(keys[i].y), more);
            dot = fmaf(q[4], low(keys[i].z), dot); more = fmaf(q[5], high(keys[i].z), more);
            dot = fmaf(q[6], low(keys[i].w), dot); more = fmaf(q[7], high(keys[i].w), more);
            dot += more;
            dot += __shfl_xor_sync(FULL, dot, 1);
            dot += __shfl_xor_sync(FULL, dot, 2);
            dot += __shfl_xor_sync(FULL, dot, 4);
            if (at_position < to) {
              const float next = fmaxf(m, dot), keep = __expf(m - next), p = __expf(dot - next);
              m = next;
              l = fmaf(l, keep, p);
              acc[0] = fmaf(acc[0], keep, p * low(values[i].x)); acc[1] = fmaf(acc[1], keep, p * high(values[i].x));
              acc[2] = fmaf(acc[2], keep, p * low(values[i].y)); acc[3] = fmaf(acc[3], keep, p * high(values[i].y));
              acc[4] = fmaf(acc[4], keep, p * low(values[i].z)); acc[5] = fmaf(acc[5], keep, p * high(values[i].z));
              acc[6] = fmaf(acc[6], keep, p * low(values[i].w)); acc[7] = fmaf(acc[7], keep, p * high(values[i].w));
            }
          }
        }
        // Four positions of the warp, then all warps.
        float most = fmaxf(m, __shfl_xor_sync(FULL, m, 8));
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 16));
        const float weight = m == -INFINITY && l == 0.f ? 0.f : __expf(m - most);
        l *= weight;
        l += __shfl_xor_sync(FULL, l, 8);
        l += __shfl_xor_sync(FULL, l, 16);
        float* own = s.merge + warp * 66;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          acc[i] *= weight;
          acc[i] += __shfl_xor_sync(FULL, acc[i], 8);
          acc[i] += __shfl_xor_sync(FULL, acc[i], 16);
          if (lane < 8) own[dims + i] = acc[i];
        }
        if (lane == 0) { own[64] = most; own[65] = l; }
        sync_workers();
        if (t < 32) {
          const float most_of = lane < WARPS ? s.merge[lane * 66 + 64] : -INFINITY;
          float all = most_of;
#pragma unroll
          for (int d = 16; d; d >>= 1) all = fmaxf(all, __shfl_xor_sync(FULL, all, d));
          const float keep = __expf(most_of - all);
          const float sum = warp_sum(lane < WARPS ? keep * s.merge[lane * 66 + 65] : 0.f);
          float y0 = 0.f, y1 = 0.f;
#pragma unroll 5
          for (int w = 0; w < WARPS; ++w) {
            const float k = __shfl_sync(FULL, keep, w);
            const float2 of = *reinterpret_cast<const float2*>(s.merge + w * 66 + 2 * t);
            y0 = fmaf(k, of.x, y0);
            y1 = fmaf(k, of.y, y1);
          }
          u32 halves;
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(__fdividef(y1, sum)), "f"(__fdividef(y0, sum)));
          u64* out = a.words + WORDS_PARTS + (split * HEADS + head) * PART_WORDS + 2 * t;
          put(out, halves, epoch);
          put(out + 1, __float_as_uint(all + __logf(sum)), epoch);
        }
      }

      // -- phase 3
      STAMP(3);
      if (t < HIDDEN / 2) {
        const u64* of_head = a.words + WORDS_PARTS + (t / 32) * PART_WORDS + 2 * (t & 31);
        float all = -INFINITY, sum = 0.f, y0 = 0.f, y1 = 0.f;
#pragma unroll 1
        for (int i = 0; i < splits; i += 4) {
          u64 y[4], w[4];
          for (bool waiting = true; waiting;) {
            waiting = false;
#pragma unroll
            for (int j = 0; j < 4; ++j) peek2(of_head + min(i + j, splits - 1) * (HEADS * PART_WORDS), y[j], w[j]);
#pragma unroll
            for (int j = 0; j < 4; ++j) waiting |= !is_new(y[j], epoch) || !is_new(w[j], epoch);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (i + j < splits) {
              const float of = __uint_as_float((u32)w[j]), next = fmaxf(all, of);
              const float keep = __expf(all - next), p = __expf(of - next);
              float lo, hi;
              asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
                  : "=f"(lo), "=f"(hi) : "r"((u32)y[j]));
              all = next;
              sum = fmaf(sum, keep, p);
              y0 = fmaf(y0, keep, p * lo);
              y1 = fmaf(y1, keep, p * hi);
            }
          }
        }
        store_x(t, __fdividef(y0, sum), __fdividef(y1, sum));
      }
      wait_bytes(chunk0, offset + at_out, at_gate - at_out);
      sync_workers();
      STAMP(4);
      if (t == 0) s.consumed = chunk0 + (offset + at_out) / CHUNK;
      rows_times<1, true>(base + at_out, rows, x_offset, 3, BLOCKS);
      sync_workers();
      if (t < rows) {
        const float x = s.own[t] += row_sum(t);
        put(a.words + WORDS_XO + r0 + t, __float_as_uint(x), epoch);
      }

      // -- phase 4
      STAMP(5);
      u32 norm = base + at_norm;
      if (norm >= RING_BYTES) norm -= RING_BYTES;
      take_normed(a.words + WORDS_XO, epoch, norm);
      STAMP(6);
      if (t == 0) s.consumed = chunk0 + (offset + at_gate) / CHUNK;
      wait_bytes(chunk0, offset + at_gate, at_down - at_gate);
      rows_times<MOST_TILES, false>(base + at_gate, gate_rows, x_offset, 3, BLOCKS);
      sync_workers();
      STAMP(7);
      if (t == 0) s.consumed = chunk0 + (offset + at_down) / CHUNK;
      if (t < (gate_rows + 31) / 32 * 32) {
        const float y = row_sum(min(t, MOST_TILES * 16 - 1)) * norm_scale();
        const float up = __shfl_xor_sync(FULL, y, 1), made = __fdividef(y, 1.f + __expf(-y)) * up;
        const float next = __shfl_down_sync(FULL, made, 2);
        if ((t & 3) == 0 && t < gate_rows) put(a.words + WORDS_H + u0 + t / 4, pair_of(made, next), epoch);
      }

      // -- phase 5
      for (bool waiting = true; waiting;) {
        u64 lo[H_LOADS], hi[H_LOADS];
#pragma unroll
        for (int i = 0; i < H_LOADS; ++i) peek2(a.words + WORDS_H + 2 * min(t + i * THREADS, UNITS / 2 - 1), lo[i], hi[i]);
        waiting = false;
#pragma unroll
        for (int i = 0; i < H_LOADS; ++i) {
          waiting |= !is_new(lo[i], epoch) || !is_new(hi[i], epoch);
          const int at = min(t + i * THREADS, UNITS / 2 - 1);
          *reinterpret_cast<uint2*>(s.h + 2 * at) = make_uint2((u32)lo[i], (u32)hi[i]);
        }
      }
      wait_bytes(chunk0, offset + at_down, layer_bytes - at_down);
      sync_workers();
      STAMP(8);
      rows_times<1, true>(base + at_down, rows, h_offset, 1, DOWN_BLOCKS);
      sync_workers();
      STAMP(9);
      if (t == 0) s.consumed = chunk0 + (offset + layer_bytes) / CHUNK;
      if (t < rows) {
        const float x = s.own[t] += row_sum(t);
        put(a.words + WORDS_XD + r0 + t, __float_as_uint(x), epoch);
      }
      STAMP(10);
    }

    // -- head. The cache's new keys and values must be seen by the blocks that attend in the next step.
    __threadfence();
    const u32 offset = LAYERS * layer_bytes;
    u32 base = (chunk0 % STAGES) * CHUNK + offset % RING_BYTES;
    if (base >= RING_BYTES) base -= RING_BYTES;
    wait_bytes(chunk0, offset, (1 + head_rows) * ROW_BYTES);
    take_normed(a.words + WORDS_XD, epoch, base);
    ++epoch;
    rows_times<MOST_TILES, false>(base + ROW_BYTES, head_rows, x_offset, 3, BLOCKS);
    sync_workers();
    if (t < head_rows && 2 * v0 + t < VOCAB)
      put(a.words + WORDS_LOGITS + 2 * v0 + t, __float_as_uint(row_sum(t) * norm_scale()), epoch);
    chunk0 += step_chunks;
    if (t == 0) s.consumed = chunk0;

    // -- sampling, by the last block: it has no part in attention
    if (b == GRID - 1) {
      int drawn = sample(a, rule, epoch, place, decoded, t);
#ifdef NOSTREAM
      if (drawn < 0 || drawn >= SPEECH) drawn = 5;
#endif
      if (t == 0) {
        const int stop = drawn < 0 ? 2 : drawn >= SPEECH ? 1 : 0;
        int count = *a.out_count;
        *a.length = position + 1;
        if (drawn >= 0) {
          a.recent[decoded & (RECENT - 1)] = s.recent[decoded & (RECENT - 1)] = drawn;
          if (count < a.out_capacity) a.out[count] = drawn;
          *a.out_count = ++count;
          *a.decoded = decoded + 1;
          *a.place = place + 1;
          *a.token = drawn;
        }
        *a.stop = stop;
        *a.remaining = *a.remaining - 1;
        if (a.host) {
          volatile int* host = a.host;
          if (drawn >= 0 && count <= a.out_capacity) host[1 + count] = drawn;
          __threadfence_system();
          host[1] = stop; host[0] = count;
        }
        const bool last = stop != 0 || step + 1 >= left;
        if (last) *a.epoch = epoch;
        put(a.words + WORDS_TOKEN, last ? 0xffffffffu : (u32)drawn, epoch);
        s.next_token = last ? -1 : drawn;
      }
    } else if (t == 0) {
      u64 word = peek(a.words + WORDS_TOKEN);
      while (!is_new(word, epoch)) word = peek(a.words + WORDS_TOKEN);
      s.next_token = (int)(u32)word;
    }
    sync_workers();
    token = s.next_token;
#ifdef NOPOLL
    token = step + 1 < left ? 5 : -1;
#endif
    if (token < 0) break;
    ++position; ++decoded; ++place;
  }
  if (t == 0) s.quit = 1;
}
