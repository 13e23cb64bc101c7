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

// The model's rule over the logits of this step. All workers of one block; returns the token, -1 if not finite.
__device__ __noinline__ int sample(const u64* logits, u32 epoch, int step, int t) {
  Shared& s = shared();
  const Rule& rule = s.rule;
  const long long place = rule.place + step;
  const int decoded = rule.decoded + step;
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
  u32* maxima = s.scratch;
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
  u64* keys = reinterpret_cast<u64*>(s.scratch);
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
    for (int i = t; i < n; i += THREADS) {
      u64 mine = keys[i];
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
