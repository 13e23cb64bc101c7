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
#define ROW_BYTES (HIDDEN * 2)
#define BLOCKS (HIDDEN / 32)
#define PER_WARP ((BLOCKS + WARPS - 1) / WARPS)
#define DOWN_BLOCKS (INTER / 32)
#define DOWN_PER_WARP ((DOWN_BLOCKS + WARPS - 1) / WARPS)
#define QKV_TILES ((2 * ((QKV_PAIRS + GRID - 1) / GRID) + 15) / 16)
#define GATE_TILES ((4 * ((UNITS + GRID - 1) / GRID) + 15) / 16)
#define HEAD_TILES ((2 * ((VOCAB_PAIRS + GRID - 1) / GRID) + 15) / 16)
#define MOST_TILES (GATE_TILES > HEAD_TILES ? GATE_TILES : HEAD_TILES)
#define DOWN_BYTES (INTER * 2)
#define UNITS (INTER / 2)
#define BIAS_BYTES 32
#ifndef FLIGHT
#define FLIGHT 5
#endif
#define H_LOADS ((UNITS / 2 + THREADS - 1) / THREADS)
#define QKV_PAIRS ((HEADS + 2 * KV_HEADS) * 32)
#define GROUP (HEADS / KV_HEADS)
#define RING_BYTES (STAGES * CHUNK)
#define PART_WORDS 34
#define VPT ((VOCAB + THREADS - 1) / THREADS)
#ifndef REPLICAS
#define REPLICAS 4
#endif
#define CANDIDATES 512
#define RECENT 64
#define FULL 0xffffffffu

struct Args {
  const char* weights;      // [GRID, block_bytes]
  const u16* speech;        // [VOCAB, HIDDEN]
  const float2* rotary;     // [positions, 32]
  u16* pool;                // [LAYERS, 2, num_pages, KV_HEADS, PAGE, 64]
  const int* table;         // the row's pages
  u64* words;               // exchange: x after attention, x after the MLP, qkv, parts, h, logits, token
  u32* epoch;
  int* token; int* length; long long* place; const long long* min_place; const int* kind; const long long* seed;
  const float* top_p; const int* top_k; const int* win_size; const double* tau_r; const float* temperature;
  int* recent; int* decoded; int* stop; int* remaining; int* out; int* out_count;
  int* host;                // mapped host memory: count, stop, tokens …; may be null
  long long* stamps;
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
#define WORDS (WORDS_TOKEN + 2)

struct __align__(128) Shared {
  char ring[RING_BYTES];
  __align__(16) u32 x[3][HIDDEN / 2];  // in bfloat16: the number, what that left, what that left
  __align__(16) u32 h[UNITS > 1280 ? UNITS : 1280];
  float merge[WARPS * 66];
  float partial[WARPS * MOST_TILES * 16];
  float own[8];
  float squares[WARPS];
  int pages[MAX_PAGES];
  int recent[RECENT];
  u64 full[STAGES];
  volatile u32 consumed;
  volatile int quit;
  volatile int next_token;
  // the sampler's; its lists of candidates lie in h, which is free then
  u32 threshold; u32 count; int again; int picked; float most; float sum; int bad;
  double scan[WARPS];
  double total;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 value) { return __uint_as_float((u32)value << 16); }
__device__ __forceinline__ u32 narrow(float value) {  // round to nearest even, as the framework does
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ void put(u64* word, u32 value, u32 epoch) {
  u64 both = ((u64)epoch << 32) | value;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}
// To all copies of the words: each serves some of the blocks, so that fewer read the same place at once.
__device__ __forceinline__ void put_all(u64* word, u32 value, u32 epoch) {
#pragma unroll
  for (int i = 0; i < REPLICAS; ++i) put(word + i * WORDS, value, epoch);
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
#ifdef PROFILE
#define STAMP(i) if (t == 0) a.stamps[((u64)b * LAYERS + layer) * 12 + i] = clock64()
#else
#define STAMP(i)
#endif
#ifndef SAMPLE_INLINE
#define SAMPLE_INLINE __noinline__
#endif
#ifndef BACKOFF
#define BACKOFF
#endif
__device__ __forceinline__ u32 take(const u64* word, u32 epoch) {
  u64 both = peek(word);
  while (!is_new(both, epoch)) both = peek(word);
  return (u32)both;
}

// Eight words at once, as numbers.
__device__ __forceinline__ void take8(const u64* words, u32 epoch, float (&y)[8]) {
  for (bool waiting = true; waiting;) {
    u64 a[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) peek2(words + 2 * i, a[2 * i], a[2 * i + 1]);
    waiting = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      waiting |= !is_new(a[i], epoch);
      y[i] = __uint_as_float((u32)a[i]);
    }
  }
}

__device__ __forceinline__ void wait_full(Shared& s, u32 chunk) {
#ifdef NOSTREAM
  return;
#endif
  u32 bar = shared_address(&s.full[chunk % STAGES]), parity = (chunk / STAGES) & 1u, done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  }
}
__device__ __forceinline__ void wait_bytes(Shared& s, u32 first_chunk, u32 offset, u32 bytes) {
  for (u32 c = offset / CHUNK; c <= (offset + bytes - 1) / CHUNK; ++c) wait_full(s, first_chunk + c);
}

// One thread: the block's stream into the ring, as far as there is room.
__device__ void produce(Shared& s, const char* source, u32 step_chunks, u32 num_steps) {
  u32 total = step_chunks * num_steps, k = 0, in_step = 0;
  u64 policy;  // weights pass through the L2 once per step; what blocks exchange must stay there
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  for (; k < total; ++k) {
    while ((int)(k - s.consumed) >= STAGES)
      if (s.quit) goto drain;
#ifdef NOSTREAM
    while (!s.quit) {}
    return;
#endif
    if (k >= FLIGHT) wait_full(s, k - FLIGHT);  // more under way would only delay what the blocks exchange
    u32 slot = k % STAGES, bar = shared_address(&s.full[slot]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"((u32)CHUNK) : "memory");
    asm volatile(
#ifdef NOHINT
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
#else
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
#endif
            shared_address(s.ring + slot * CHUNK)),
        "l"(source + (u64)in_step * CHUNK), "r"((u32)CHUNK), "r"(bar), "l"(policy) : "memory");
    if (++in_step == step_chunks) in_step = 0;
  }
drain:
  while (!s.quit) {}
  for (u32 j = s.consumed; (int)(k - j) > 0; ++j) wait_full(s, j);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
  return v;
}

__device__ __forceinline__ uint4 ring_chunk(const Shared& s, u32 base, u32 chunk) {
  u32 at = base + chunk * 16;
  if (at >= RING_BYTES) at -= RING_BYTES;
  return *reinterpret_cast<const uint4*>(s.ring + at);
}

// The t-th word of what begins at base.
__device__ __forceinline__ u32 ring_word(const Shared& s, u32 base, u32 t) {
  u32 at = base + t * 4;
  if (at >= RING_BYTES) at -= RING_BYTES;
  return *reinterpret_cast<const u32*>(s.ring + at);
}

__device__ __forceinline__ u32 pair_of(float a, float b) { return narrow(a) | (narrow(b) << 16); }

// Two neighbours of a vector, each as a sum of three bfloat16 numbers: float32 but for the last bit.
__device__ __forceinline__ void store_x(Shared& s, int t, float a, float b) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 both = pair_of(a, b);
    s.x[i][t] = both;
    a -= low(both); b -= high(both);
  }
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Rows in the ring times a vector, this warp's share of the columns; sums per row into s.partial.
// The rows lie in blocks of 32 columns, in a block row after row. A lane's 16 bytes of a row are its elements of two
// products of 16 columns; the order of columns within 32 is the same for the vector. A product's columns are the parts
// of the vector. Rows beyond the last read what follows; nobody looks at their sums.
template <int TILES, bool IS_HALF, int PARTS>
__device__ __forceinline__ void rows_times(Shared& s, u32 base, int rows, const u32* x, int stride, int from, int to,
                                           int warp, int lane) {
  const int g = lane >> 2, q = lane & 3;
  float c[TILES][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[tile][i] = 0.f;
  for (int block = from; block < to; ++block) {
    uint4 xv = make_uint4(0, 0, 0, 0);
    if (g < PARTS) xv = *reinterpret_cast<const uint4*>(x + g * stride + block * 16 + q * 4);
    u32 at = base + (u32)(block * rows + g) * 64 + q * 16;
    while (at >= RING_BYTES) at -= RING_BYTES;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 w0 = *reinterpret_cast<const uint4*>(s.ring + at);
      at += 512; if (at >= RING_BYTES) at -= RING_BYTES;
      uint4 w1 = make_uint4(0, 0, 0, 0);
      if (!IS_HALF) {
        w1 = *reinterpret_cast<const uint4*>(s.ring + at);
        at += 512; if (at >= RING_BYTES) at -= RING_BYTES;
      }
      multiply(c[tile], w0.x, w1.x, w0.y, w1.y, xv.x, xv.y);
      multiply(c[tile], w0.z, w1.z, w0.w, w1.w, xv.z, xv.w);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float upper = c[tile][0] + c[tile][1], lower = c[tile][2] + c[tile][3];
    upper += __shfl_xor_sync(FULL, upper, 1);
    if (!IS_HALF) lower += __shfl_xor_sync(FULL, lower, 1);
    float* const sums = s.partial + warp * (MOST_TILES * 16) + tile * 16;
    if (q == 0) {
      sums[g] = upper;
      if (!IS_HALF) sums[g + 8] = lower;
    }
  }
}

__device__ __forceinline__ float row_sum(const Shared& s, int row, int warps) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) if (w < warps) sum += s.partial[w * (MOST_TILES * 16) + row];
  return sum;
}
#define X_WARPS ((BLOCKS + PER_WARP - 1) / PER_WARP)
#define DOWN_WARPS ((DOWN_BLOCKS + DOWN_PER_WARP - 1) / DOWN_PER_WARP)

// x of all blocks, times the norm's weights, into shared memory; returns 1 / root mean square.
__device__ __forceinline__ float take_normed(Shared& s, const u64* words, u32 epoch, u32 norm, int t) {
  float squares = 0.f;
  if (t < HIDDEN / 2) {
    const u32 w = ring_word(s, norm, t);
    u64 a, b;
    for (peek2(words + 2 * t, a, b); !is_new(a, epoch) || !is_new(b, epoch); peek2(words + 2 * t, a, b)) { BACKOFF; }
    float x0 = __uint_as_float((u32)a), x1 = __uint_as_float((u32)b);
    store_x(s, t, x0 * low(w), x1 * high(w));
    squares = x0 * x0 + x1 * x1;
  }
  squares = warp_sum(squares);
  if ((t & 31) == 0) s.squares[t >> 5] = squares;
  sync_workers();
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += s.squares[w];
  return rsqrtf(sum * (1.f / HIDDEN) + EPS);
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

__device__ float block_max(Shared& s, float v, int t) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
  sync_workers();
  if ((t & 31) == 0) s.squares[t >> 5] = v;
  sync_workers();
  float most = s.squares[0];
  for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.squares[w]);
  return most;
}
__device__ float block_sum(Shared& s, float v, int t) {
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
__device__ SAMPLE_INLINE int sample(Shared& s, const Args& a, const Rule& rule, u32 epoch, long long place, int decoded, int t) {
  const u64* logits = a.words + (GRID - 1) % REPLICAS * WORDS + WORDS_LOGITS;
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
  most = block_max(s, most, t);
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
  sum = block_sum(s, sum, t);
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
  rest = block_max(s, rest, t);
  if (rest == (-INFINITY)) return first;
  sum = 0.f;
#pragma unroll
  for (int j = 0; j < VPT; ++j) sum += v[j] = expf(v[j] - rest);
  sum = block_sum(s, sum, t);
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
  extern __shared__ __align__(128) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, b = blockIdx.x;
  int left = min(*a.remaining, a.num_steps);
  if (*a.stop != 0 || left <= 0) return;

  if (t == 0) {
    for (int i = 0; i < STAGES; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    s.consumed = 0;
    s.quit = 0;
  }
  for (int i = t; i < a.table_len; i += THREADS + 32) s.pages[i] = a.table[i];
  if (t < RECENT) s.recent[t] = a.recent[t];
  __syncthreads();

  // The block's share of every matrix.
  const int p0 = b * QKV_PAIRS / GRID, p1 = (b + 1) * QKV_PAIRS / GRID;
  const int r0 = b * HIDDEN / GRID, rows = (b + 1) * HIDDEN / GRID - r0;
  const int u0 = b * UNITS / GRID, units = (b + 1) * UNITS / GRID - u0;
  const int v0 = b * (VOCAB_PAIRS) / GRID, v1 = (b + 1) * (VOCAB_PAIRS) / GRID;
  // Offsets in a layer's stream: norm, bias, query-key-value rows, output rows, norm, gate and up rows, down rows.
  const int qkv_rows = 2 * (p1 - p0), head_rows = 2 * (v1 - v0);
  const u32 at_qkv = ROW_BYTES + BIAS_BYTES, at_out = at_qkv + qkv_rows * ROW_BYTES;
  const u32 at_norm = at_out + rows * ROW_BYTES, at_gate = at_norm + ROW_BYTES;
  const u32 at_down = at_gate + units * 4 * ROW_BYTES, layer_bytes = at_down + rows * DOWN_BYTES;
  const u32 step_chunks = (LAYERS * layer_bytes + ROW_BYTES + head_rows * ROW_BYTES + CHUNK - 1) / CHUNK;
  if (warp == WARPS) {
    if (lane == 0) produce(s, a.weights + (u64)b * a.block_bytes, step_chunks, left);
    return;
  }
  // Written: the first copy, and by put_all the others; read: this block's copy.
  const u64* const mine_words = a.words + b % REPLICAS * WORDS;
  const int k0 = min(warp * PER_WARP, BLOCKS), k1 = min(k0 + PER_WARP, BLOCKS);
  const int d0 = min(warp * DOWN_PER_WARP, DOWN_BLOCKS), d1 = min(d0 + DOWN_PER_WARP, DOWN_BLOCKS);

  u32 epoch = *a.epoch, chunk0 = 0;
  int token = *a.token, position = *a.length, decoded = *a.decoded;
  long long place = *a.place;
  const Rule rule = {*a.min_place, *a.seed, *a.tau_r, *a.top_p, *a.temperature, *a.kind, *a.top_k, *a.win_size};

  for (int step = 0;; ++step) {
    const int length = position + 1;
    const int splits = min(SPLITS, (length + 4 * WARPS - 1) / (4 * WARPS)), per = (length + splits - 1) / splits;
    const int head = b % HEADS, split = b / HEADS, from = split * per, to = min(length, from + per);
    const bool attends = split < splits;
    const int mine = from + warp * 4 + (lane >> 3), dims = (lane & 7) * 8;
    const u64 page_stride = (u64)KV_HEADS * PAGE * 64;
    float e0 = 0.f, e1 = 0.f;
    if (t < HIDDEN / 2) {
      const u32 e = *reinterpret_cast<const u32*>(a.speech + (u64)token * HIDDEN + 2 * t);
      e0 = low(e); e1 = high(e);
      const int own = 2 * t - r0;  // rows that this block owns start its residual
      if (own >= 0 && own < rows) s.own[own] = e0;
      if (own + 1 >= 0 && own + 1 < rows) s.own[own + 1] = e1;
    }
    const float e_squares = warp_sum(e0 * e0 + e1 * e1);
    if (lane == 0) s.squares[warp] = e_squares;
    const int pair = p0 + (t >> 1);  // of the rows that this thread finishes
    float2 turn = make_float2(1.f, 0.f);
    if (pair < p1 && pair / 32 < HEADS + KV_HEADS) turn = a.rotary[(u64)position * 32 + pair % 32];

    for (int layer = 0; layer < LAYERS; ++layer) {
      ++epoch;
      const u32 offset = layer * layer_bytes;
      u32 base = (chunk0 % STAGES) * CHUNK + offset % RING_BYTES;
      if (base >= RING_BYTES) base -= RING_BYTES;

      STAMP(0);
      // -- phase 1. What does not wait for others is asked for first.
      uint4 key = make_uint4(0, 0, 0, 0), value = make_uint4(0, 0, 0, 0);
      const u16* pool = a.pool + (u64)layer * 2 * a.num_pages * page_stride + (u64)(head / GROUP) * PAGE * 64;
      const u64 to_values = a.num_pages * page_stride;
      if (attends && mine < to && mine < position) {
        const u16* at = pool + s.pages[mine / PAGE] * page_stride + (mine % PAGE) * 64 + dims;
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(key.x), "=r"(key.y), "=r"(key.z), "=r"(key.w) : "l"(at));
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(at + to_values));
      }
      float scale;
      wait_bytes(s, chunk0, offset, at_qkv);
      if (layer) scale = take_normed(s, mine_words + WORDS_XD, epoch - 1, base, t);
      else {
        if (t < HIDDEN / 2) store_x(s, t, e0 * low(ring_word(s, base, t)), e1 * high(ring_word(s, base, t)));
        sync_workers();
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.squares[w];
        scale = rsqrtf(sum * (1.f / HIDDEN) + EPS);
      }
      STAMP(1);
      if (k0 < k1) {
        wait_bytes(s, chunk0, offset + at_qkv + k0 * qkv_rows * 64, (k1 - k0) * qkv_rows * 64);
        rows_times<QKV_TILES, false, 3>(s, base + at_qkv, qkv_rows, s.x[0], HIDDEN / 2, k0, k1, warp, lane);
      }
      sync_workers();
      if (t < 32) {
        const u32 bias = ring_word(s, base, ROW_BYTES / 4 + min(t >> 1, BIAS_BYTES / 4 - 1));
        float y = t < qkv_rows ? fmaf(row_sum(s, t, X_WARPS), scale, t & 1 ? high(bias) : low(bias)) : 0.f;
        const float other = __shfl_xor_sync(FULL, y, 1);
        y = t & 1 ? y * turn.x + other * turn.y : y * turn.x - other * turn.y;
        const int which = pair / 32, d = pair % 32 + 32 * (t & 1);
        if (which < HEADS) y *= 0.125f;
        else if (t < qkv_rows) {
          const u32 half = narrow(y);
          y = low(half);
          const int kv = (which - HEADS) % KV_HEADS;
          a.pool[(u64)layer * 2 * a.num_pages * page_stride + (which >= HEADS + KV_HEADS ? to_values : 0)
              + s.pages[position / PAGE] * page_stride + (u64)(kv * PAGE + position % PAGE) * 64 + d] = (u16)half;
        }
        if (t < qkv_rows) put_all(a.words + WORDS_QKV + which * 64 + d, __float_as_uint(y), epoch);
      }

      STAMP(2);
      // -- phase 2
      if (attends) {
        float q[8];
        const u64* from_q = mine_words + WORDS_QKV + head * 64 + dims;
        take8(from_q, epoch, q);
        float m = (-INFINITY), l = 0.f, acc[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = 0.f;
        for (int at_position = mine; at_position - (lane >> 3) < to; at_position += 4 * WARPS) {
          const bool valid = at_position < to;
          if (at_position != mine && valid && at_position < position) {
            const u16* at = pool + s.pages[at_position / PAGE] * page_stride + (at_position % PAGE) * 64 + dims;
            asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                : "=r"(key.x), "=r"(key.y), "=r"(key.z), "=r"(key.w) : "l"(at));
            asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(at + to_values));
          }
          float k[8], w[8];
          k[0] = low(key.x); k[1] = high(key.x); k[2] = low(key.y); k[3] = high(key.y);
          k[4] = low(key.z); k[5] = high(key.z); k[6] = low(key.w); k[7] = high(key.w);
          w[0] = low(value.x); w[1] = high(value.x); w[2] = low(value.y); w[3] = high(value.y);
          w[4] = low(value.z); w[5] = high(value.z); w[6] = low(value.w); w[7] = high(value.w);
          if (at_position == position) {
            const u64* new_key = mine_words + WORDS_QKV + (HEADS + head / GROUP) * 64 + dims;
            take8(new_key, epoch, k);
            take8(new_key + KV_HEADS * 64, epoch, w);
          }
          __syncwarp();
          float score = 0.f;
#pragma unroll
          for (int i = 0; i < 8; ++i) score = fmaf(q[i], k[i], score);
          score += __shfl_xor_sync(FULL, score, 1);
          score += __shfl_xor_sync(FULL, score, 2);
          score += __shfl_xor_sync(FULL, score, 4);
          if (valid) {
            const float next = fmaxf(m, score), keep = __expf(m - next), p = __expf(score - next);
            l = l * keep + p;
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i] = acc[i] * keep + p * w[i];
            m = next;
          }
        }
        // Four positions of the warp, then all warps.
        float most = fmaxf(m, __shfl_xor_sync(FULL, m, 8));
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 16));
        const float weight = m == (-INFINITY) ? 0.f : __expf(m - most);
        l *= weight;
        l += __shfl_xor_sync(FULL, l, 8);
        l += __shfl_xor_sync(FULL, l, 16);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          acc[i] *= weight;
          acc[i] += __shfl_xor_sync(FULL, acc[i], 8);
          acc[i] += __shfl_xor_sync(FULL, acc[i], 16);
        }
        float* own = s.merge + warp * 66;
        if (lane < 8) {
#pragma unroll
          for (int i = 0; i < 8; ++i) own[dims + i] = acc[i];
          if (lane == 0) { own[64] = most; own[65] = l; }
        }
        sync_workers();
        if (t < 32) {
          float all = (-INFINITY);
#pragma unroll
          for (int w = 0; w < WARPS; ++w) all = fmaxf(all, s.merge[w * 66 + 64]);
          float sum = 0.f, y0 = 0.f, y1 = 0.f;
#pragma unroll
          for (int w = 0; w < WARPS; ++w) {
            const float keep = __expf(s.merge[w * 66 + 64] - all);
            sum = fmaf(keep, s.merge[w * 66 + 65], sum);
            y0 = fmaf(keep, s.merge[w * 66 + 2 * t], y0);
            y1 = fmaf(keep, s.merge[w * 66 + 2 * t + 1], y1);
          }
          y0 /= sum; y1 /= sum;
          u32 halves;
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(y1), "f"(y0));
          u64* out = a.words + WORDS_PARTS + (split * HEADS + head) * PART_WORDS;
          put_all(out + t, halves, epoch);
          if (t == 0) put_all(out + 32, __float_as_uint(all + __logf(sum)), epoch);
        }
      }

      STAMP(3);
      // -- phase 3
      if (t < HIDDEN / 2) {
        const u64* of_head = mine_words + WORDS_PARTS + (t / 32) * PART_WORDS;
        float weights[SPLITS];
        u32 got[SPLITS];
        float all = (-INFINITY);
#ifdef GATE_PARTS
        for (u64 first = peek(of_head + 32 + (splits - 1) * HEADS * PART_WORDS); !is_new(first, epoch);)
          first = peek(of_head + 32 + (splits - 1) * HEADS * PART_WORDS);
#endif
        bool waiting = true;
        while (waiting) {
          waiting = false;
#pragma unroll
          for (int i = 0; i < SPLITS; ++i) {
            if (i < splits) {
              const u64 y = peek(of_head + i * HEADS * PART_WORDS + (t & 31));
              const u64 w = peek(of_head + i * HEADS * PART_WORDS + 32);
              waiting |= !is_new(y, epoch) || !is_new(w, epoch);
              got[i] = (u32)y; weights[i] = __uint_as_float((u32)w);
            } else { got[i] = 0; weights[i] = (-INFINITY); }
          }
          if (waiting) { BACKOFF; }
        }
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) all = fmaxf(all, weights[i]);
        float sum = 0.f, y0 = 0.f, y1 = 0.f;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
          const float w = __expf(weights[i] - all);
          float lo, hi;
          asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
              : "=f"(lo), "=f"(hi) : "r"(got[i]));
          sum += w; y0 = fmaf(w, lo, y0); y1 = fmaf(w, hi, y1);
        }
        store_x(s, t, y0 / sum, y1 / sum);
      }
      sync_workers();
      STAMP(4);
      if (t == 0) s.consumed = chunk0 + (offset + at_out) / CHUNK;
      if (k0 < k1) {
        wait_bytes(s, chunk0, offset + at_out + k0 * rows * 64, (k1 - k0) * rows * 64);
        rows_times<1, true, 3>(s, base + at_out, rows, s.x[0], HIDDEN / 2, k0, k1, warp, lane);
      }
      sync_workers();
      if (t < rows) {
        const float x = s.own[t] += row_sum(s, t, X_WARPS);
        put_all(a.words + WORDS_XO + r0 + t, __float_as_uint(x), epoch);
      }

      STAMP(5);
      // -- phase 4
      u32 norm = base + at_norm;
      if (norm >= RING_BYTES) norm -= RING_BYTES;
      wait_bytes(s, chunk0, offset + at_norm, ROW_BYTES);
      scale = take_normed(s, mine_words + WORDS_XO, epoch, norm, t);
      STAMP(6);
      if (t == 0) s.consumed = chunk0 + (offset + at_gate) / CHUNK;
      if (k0 < k1) {
        const int gate_rows = 4 * units;
        wait_bytes(s, chunk0, offset + at_gate + k0 * gate_rows * 64, (k1 - k0) * gate_rows * 64);
        rows_times<GATE_TILES, false, 3>(s, base + at_gate, gate_rows, s.x[0], HIDDEN / 2, k0, k1, warp, lane);
      }
      sync_workers();
      STAMP(7);
      if (t == 0) s.consumed = chunk0 + (offset + at_down) / CHUNK;
      if (t < (4 * units + 31) / 32 * 32) {
        const float y = t < 4 * units ? row_sum(s, t, X_WARPS) * scale : 0.f;
        const float up = __shfl_xor_sync(FULL, y, 1), made = y / (1.f + __expf(-y)) * up;
        const float next = __shfl_down_sync(FULL, made, 2);
        if ((t & 3) == 0 && t < 4 * units) put_all(a.words + WORDS_H + u0 + t / 4, pair_of(made, next), epoch);
      }

      // -- phase 5
#ifdef GATE_H
      if (t < UNITS / 2) {  // one word until it is new: the others come with it
        u64 first = peek(mine_words + WORDS_H + 2 * t);
        while (!is_new(first, epoch)) first = peek(mine_words + WORDS_H + 2 * t);
      }
#endif
      for (bool waiting = true; waiting;) {
        u64 lo[H_LOADS], hi[H_LOADS];
#pragma unroll
        for (int i = 0; i < H_LOADS; ++i) {
          const int at = min(t + i * THREADS, UNITS / 2 - 1);
          peek2(mine_words + WORDS_H + 2 * at, lo[i], hi[i]);
        }
        waiting = false;
#pragma unroll
        for (int i = 0; i < H_LOADS; ++i) {
          waiting |= !is_new(lo[i], epoch) || !is_new(hi[i], epoch);
          if (t + i * THREADS < UNITS / 2)
            *reinterpret_cast<uint2*>(s.h + 2 * (t + i * THREADS)) = make_uint2((u32)lo[i], (u32)hi[i]);
        }
        if (waiting) { BACKOFF; }
      }
      sync_workers();
      STAMP(8);
      if (d0 < d1) {
        wait_bytes(s, chunk0, offset + at_down + d0 * rows * 64, (d1 - d0) * rows * 64);
        STAMP(9);
        rows_times<1, true, 1>(s, base + at_down, rows, s.h, 0, d0, d1, warp, lane);
      }
      sync_workers();
      STAMP(10);
      if (t == 0) s.consumed = chunk0 + (offset + layer_bytes) / CHUNK;
      if (t < rows) {
        const float x = s.own[t] += row_sum(s, t, DOWN_WARPS);
        put_all(a.words + WORDS_XD + r0 + t, __float_as_uint(x), epoch);
      }
    }

    // -- head. The cache's new keys and values must be seen by the blocks that attend in the next step.
    __threadfence();
    {
      const u32 offset = LAYERS * layer_bytes;
      u32 base = (chunk0 % STAGES) * CHUNK + offset % RING_BYTES;
      if (base >= RING_BYTES) base -= RING_BYTES;
      wait_bytes(s, chunk0, offset, ROW_BYTES);
      const float scale = take_normed(s, mine_words + WORDS_XD, epoch, base, t);
      ++epoch;
      if (k0 < k1) {
        wait_bytes(s, chunk0, offset + ROW_BYTES + k0 * head_rows * 64, (k1 - k0) * head_rows * 64);
        rows_times<HEAD_TILES, false, 3>(s, base + ROW_BYTES, head_rows, s.x[0], HIDDEN / 2, k0, k1, warp, lane);
      }
      sync_workers();
      if (t < head_rows && 2 * v0 + t < VOCAB)
        put(a.words + (GRID - 1) % REPLICAS * WORDS + WORDS_LOGITS + 2 * v0 + t,
            __float_as_uint(row_sum(s, t, X_WARPS) * scale), epoch);
      chunk0 += step_chunks;
      if (t == 0) s.consumed = chunk0;
    }

    // -- sampling, by the last block: it has no part in attention
    const u64* const word = mine_words + WORDS_TOKEN;
    if (b == GRID - 1) {
      int drawn = sample(s, a, rule, epoch, place, decoded, t);
#ifdef NOSTREAM
      if (drawn < 0 || drawn >= SPEECH) drawn = 5;
#endif
      if (t == 0) {
        int stop = drawn < 0 ? 2 : drawn >= SPEECH ? 1 : 0, count = *a.out_count;
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
        if (last) { *a.epoch = epoch; }
        put_all(a.words + WORDS_TOKEN, last ? 0xffffffffu : (u32)drawn, epoch);
        s.next_token = last ? -1 : drawn;
      }
    } else if (t == 0) s.next_token = (int)take(word, epoch);
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
