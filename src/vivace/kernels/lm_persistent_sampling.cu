// The sampling rule of the speech LM, run by one block over the scores of one step.

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
  if ((t & 31) == 0) s.block[t >> 5] = v;
  sync_workers();
  float most = s.block[0];
  for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.block[w]);
  return most;
}
__device__ float block_sum(float v, int t) {
  Shared& s = shared();
  v = warp_sum(v);
  sync_workers();
  if ((t & 31) == 0) s.block[t >> 5] = v;
  sync_workers();
  float sum = 0.f;
  for (int w = 0; w < WARPS; ++w) sum += s.block[w];
  return sum;
}

// An integer that is in the same order as the number, and back; negative zero is below zero.
__device__ __forceinline__ int in_order(float v) {
  const int bits = (int)__float_as_uint(v);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_order(int order) { return __uint_as_float((u32)(order ^ ((order >> 31) & 0x7fffffff))); }

// What a score counts, before all are divided by their sum.
struct Scale {
  float most, temperature, inverse, lowest;
  __device__ __forceinline__ Scale(float most, float asked) : most(most) {
    temperature = fmaxf(asked, 0x1p-60f);
    inverse = 1.f / temperature;
    lowest = -128.f * temperature;  // counts nothing, as all below
  }
  __device__ __forceinline__ float weight(float v) const {
    float score = v - most;
    if (temperature != 1.f) {  // the division, rounded as it should be, for numbers of such sizes
      score = score < lowest ? lowest : score;
      const float about = score * inverse;
      score = fmaf(fmaf(-temperature, about, score), inverse, about);
    }
    return expf(score);
  }
};

// Candidates: a float's bits above, below them the id from behind, so that of equal ones the lower id comes first.
__device__ __forceinline__ u64 candidate(float v, int id) { return ((u64)__float_as_uint(v) << 32) | (0xffffffffu - (u32)id); }
__device__ __forceinline__ int id_of(u64 candidate) { return (int)(0xffffffffu - (u32)candidate); }
__device__ __forceinline__ float number_of(u64 candidate) { return __uint_as_float((u32)(candidate >> 32)); }
// The candidate by its probability, instead of its score.
__device__ __forceinline__ u64 by_probability(u64 scored, const Scale& scale, float sum) {
  const float p = scale.weight(number_of(scored)) / sum;
  return ((u64)__float_as_uint(p) << 32) | (u32)scored;
}

#define LIKELY 96                // scores that warps tell, at most, and gaps
#define NONE ((int)0x80000000u)

// How many of four are larger than another.
__device__ __forceinline__ int above_of(const int* four, int other) {
  const uint4 v = *reinterpret_cast<const uint4*>(four);
  return ((other - v.x) >> 31) + ((other - v.y) >> 31) + ((other - v.z) >> 31) + ((other - v.w) >> 31);
}

// One warp: up to 32 * HALVES candidates with scores become sorted ones with probabilities.
template <int HALVES>
__device__ __forceinline__ void sort_candidates(u64* keys, u64* sorted, int n, const Scale& scale, float sum, int lane) {
  u64 mine[HALVES];
  int rank[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int i = lane + 32 * half;
    mine[half] = i < n ? by_probability(keys[i], scale, sum) : 0;
    keys[i] = mine[half];
    rank[half] = 0;
  }
  __syncwarp();
#pragma unroll 4
  for (int i = 0; i < n; i += 2) {
    const uint4 two = *reinterpret_cast<const uint4*>(keys + i);
    const u64 a = ((u64)two.y << 32) | two.x, b = ((u64)two.w << 32) | two.z;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) rank[half] += (a > mine[half]) + (b > mine[half]);
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half)
    if (lane + 32 * half < n) sorted[rank[half]] = mine[half];
  __syncwarp();
}

// One warp: which of n <= 32 * HALVES sorted candidates is drawn.
template <int HALVES>
__device__ __forceinline__ int draw(const u64* sorted, int n, float top_p, double share, int lane) {
  float p[HALVES], running[HALVES];
  double cumulative[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int i = lane + 32 * half;
    p[half] = i < n ? number_of(sorted[i]) : 0.f;
    running[half] = p[half];
  }
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const float other = __shfl_up_sync(FULL, running[half], d);
      if (lane >= d) running[half] += other;
    }
  }
  if (HALVES == 2) running[HALVES - 1] += __shfl_sync(FULL, running[0], 31);
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const bool kept = lane + 32 * half == 0 || running[half] - p[half] < top_p;
    cumulative[half] = kept ? (double)p[half] : 0.0;
  }
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const double other = __shfl_up_sync(FULL, cumulative[half], d);
      if (lane >= d) cumulative[half] += other;
    }
  }
  if (HALVES == 2) cumulative[HALVES - 1] += __shfl_sync(FULL, cumulative[0], 31);
  const double target = share * __shfl_sync(FULL, cumulative[HALVES - 1], 31);
  int index = 0;
#pragma unroll
  for (int half = 0; half < HALVES; ++half)
    index += __popc(__ballot_sync(FULL, lane + 32 * half < n && cumulative[half] <= target));
  return min(index, n - 1);
}

// The sum of all warps' sums.
__device__ __forceinline__ float joined_sum() {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += shared().block[w];
  return sum;
}

// The model's rule over the logits of this step. All workers of one block. Thread 0 gets the token, -1 if not finite.
//
// A score that at least k reach is told by what every warp's likeliest lanes have. All that reach it are candidates, and
// one warp sorts them and draws, without the others.
__device__ __noinline__ int sample(const u64* logits, u32 epoch, int step, int t) {
  Shared& s = shared();
  const Rule& rule = s.rule;
  const long long place = rule.place + step;
  const int decoded = rule.decoded + step;
  const int kind = place < rule.min_place ? 1 : rule.kind, lane = t & 31, warp = t >> 5;
  const float temperature = rule.temperature;
  const bool greedy = temperature <= 0.f;
  u64* const keys = reinterpret_cast<u64*>(s.scratch);
  u64* const sorted = keys + CANDIDATES;
  int* const tops = reinterpret_cast<int*>(sorted + RECENT);  // [LIKELY] of all warps
  u64 word[VPT];
#pragma unroll
  for (int j = 0; j < VPT; ++j) word[j] = peek(logits + ((j + 1) * THREADS <= VOCAB ? t + j * THREADS : min(t + j * THREADS, VOCAB - 1)));
  // What does not need the scores, while they come.
  const int k = greedy ? 1 : min(max(rule.top_k, 1), RECENT);
  const int ranks = max(4, (k + WARPS - 1) / WARPS), told = ranks * WARPS;
  for (int i = told + t; i < LIKELY; i += THREADS) tops[i] = NONE >> 1;
  if (t == 0) {
    s.count = 0;
    s.scan[0] = uniform(rule.seed, place, 0);
  }
  for (bool waiting = true; waiting;) {
    waiting = false;
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if (!is_new(word[j], epoch)) {
        word[j] = peek(logits + ((j + 1) * THREADS <= VOCAB ? t + j * THREADS : min(t + j * THREADS, VOCAB - 1)));
        waiting = true;
      }
  }
  mark(23);
  float v[VPT], largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    const int id = t + j * THREADS;
    v[j] = __uint_as_float((u32)word[j]);
    if ((j + 1) * THREADS > SPEECH && (id >= VOCAB || !is_allowed(id, kind))) v[j] = -INFINITY;
    largest = fmaxf(largest, v[j]);
  }
  int order = in_order(largest);
#pragma unroll 4
  for (int n = 0; n < ranks; ++n) {
    const int top = __reduce_max_sync(FULL, order), at = n * WARPS + warp;
    if (lane == 0) {
      if (n == 0) s.block[warp] = from_order(top);
      tops[at] = ((top >> 1) & ~127) | (127 - at);  // no two are equal, and all differences are integers
    }
    if (order == top) order = NONE;
  }
  sync_workers();
  mark(24);
  const float most = from_order(__reduce_max_sync(FULL, in_order(s.block[lane < WARPS ? lane : 0])));
  if (!(most < INFINITY) || most == -INFINITY) return -1;
  const Scale scale(most, greedy ? 1.f : temperature);
#pragma unroll 1
  for (int base = 0; base < told; base += THREADS / 8) {  // the k-th of what was told: 8 lanes for each
    const int i = base + (t >> 3), part = t & 7, mine = tops[min(i, LIKELY - 1)];
    int above = above_of(tops + part * 4, mine) + above_of(tops + part * 4 + 32, mine);
    if (told > 64) above += above_of(tops + part * 4 + 64, mine);
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) above += __shfl_xor_sync(FULL, above, d);
    if (above == k - 1 && part == 0 && i < told) s.threshold = (u32)(mine & ~127) << 1;
  }
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < VPT / 2; ++j) sum += scale.weight(v[j]);
  sync_workers();
  mark(25);
  // Slightly different scores may have equal probabilities, and then ids decide. NONE is no number here.
  const float cut = greedy ? most : fmaxf(from_order(s.threshold) - 1e-4f * temperature, -3.402823466e38f);
  if (largest >= cut) {
    int passed = 0;
    u32 failed = 0;  // a bit for each
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      if (VPT <= 32) failed = (failed << 1) | (__float_as_uint(v[j] - cut) >> 31);
      else passed += v[j] >= cut;
    }
    if (VPT <= 32) passed = VPT - __popc(failed);
    const u32 at = atomicAdd(&s.count, (u32)passed);
    if (at + passed <= CANDIDATES) {
      u64* to = keys + at;
      if (VPT <= 32 && passed == 1) {
        *to = candidate(largest, t + (VPT - __ffs(~failed)) * THREADS);
      } else {
#pragma unroll
        for (int j = 0; j < VPT; ++j)
          if (v[j] >= cut) *to++ = candidate(v[j], t + j * THREADS);
      }
    }
  }
#pragma unroll
  for (int j = VPT / 2; j < VPT; ++j) sum += scale.weight(v[j]);  // a NaN anywhere is one here
  sum = warp_sum(sum);
  if (lane == 0) s.block[warp] = sum;
  sync_workers();
  mark(26);
  const int count = s.count;
  if (count > CANDIDATES) {  // very many equal scores: one after the other
    sum = joined_sum();
#pragma unroll
    for (int j = 0; j < VPT; ++j) v[j] = v[j] >= cut ? scale.weight(v[j]) / sum : -1.f;
    for (int i = 0; i < k; ++i) {
      u64 best = 0, last = i ? sorted[i - 1] : ~0ull;
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        const u64 key = candidate(v[j], t + j * THREADS);
        if (v[j] >= 0.f && key < last && key > best) best = key;
      }
      for (int d = 16; d; d >>= 1) best = max(best, __shfl_xor_sync(FULL, best, d));
      sync_workers();
      if (lane == 0) keys[warp] = best;
      sync_workers();
      if (t == 0) {
        for (int w = 1; w < WARPS; ++w) keys[0] = max(keys[0], keys[w]);
        sorted[i] = keys[0];
      }
      sync_workers();
    }
  } else if (count > 64) {
    sum = joined_sum();
    for (int i = t; i < count; i += THREADS) keys[i] = by_probability(keys[i], scale, sum);
    sync_workers();
    for (int i = t; i < count; i += THREADS) {
      const u64 mine = keys[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += keys[j] > mine;
      if (rank < RECENT) sorted[rank] = mine;
    }
    sync_workers();
  }
  if (warp == 0) {
    int drawn[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) drawn[half] = s.recent[(decoded - (lane + 1 + 32 * half)) & (RECENT - 1)];
    const int window = min(rule.win_size, min(decoded, RECENT)), n = min(count, k);
    const double share = s.scan[0], most_repeats = (double)rule.win_size * rule.tau_r;
    const bool resamples = !greedy && rule.win_size > 0;
    const float top_p = rule.top_p;
    sum = joined_sum();
    if (count <= 32) sort_candidates<1>(keys, sorted, count, scale, sum, lane);
    else if (count <= 64) sort_candidates<2>(keys, sorted, count, scale, sum, lane);
    mark(27);
    const int index = greedy ? 0 : n <= 32 ? draw<1>(sorted, n, top_p, share, lane) : draw<2>(sorted, n, top_p, share, lane);
    const bool finite = sum < INFINITY;
    const int first = finite ? id_of(sorted[index]) : -1;
    int repeats = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      repeats += __popc(__ballot_sync(FULL, lane + 1 + 32 * half <= window && drawn[half] == first));
    const bool again = finite && resamples && (double)repeats >= most_repeats;
    if (lane == 0) {
      s.picked = first;
      s.again = again;
    }
    mark(28);
    if (!again) {  // the others need not have come
      bar_arrive<1, THREADS>();
      return first;
    }
  }
  sync_workers();
  if (!s.again) return s.picked;
  // Once more, from all the others: in the order of ids, a run of ids per thread.
  const int first = s.picked;
  float rest = -INFINITY;
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    int id = t * VPT + j;
    v[j] = id < VOCAB && id != first && is_allowed(id, kind) ? __uint_as_float((u32)peek(logits + id)) : -INFINITY;
    if (temperature != 1.f) v[j] = (v[j] - most) / temperature;
    rest = fmaxf(rest, v[j]);
  }
  rest = block_max(rest, t);
  if (rest == -INFINITY) return first;
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
