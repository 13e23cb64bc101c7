// Attention of one head over one part of the past: products of 16 positions per warp on the matrix units. The query's two
// parts in bfloat16 are the first two of 16 rows. A helper warp fetches the query, has the position that is made in this
// step, and joins the warps' results.

#define TILE_POSITIONS 16
#define PASS (WARPS * TILE_POSITIONS)

struct Past { int from, to, splits; };

// Which positions before `past` are part `split`'s.
__device__ __forceinline__ Past part_of(int past, int split) {
  const int tiles = (past + TILE_POSITIONS - 1) / TILE_POSITIONS, wanted = min(SPLITS, max(1, (tiles + WARPS - 1) / WARPS));
  const int per = max(1, (tiles + wanted - 1) / wanted), splits = max(1, (tiles + per - 1) / per);
  return {split * per * TILE_POSITIONS, min(past, (split + 1) * per * TILE_POSITIONS), splits};
}

struct Tile { uint4 k[4], v[4]; };  // of 8 positions: columns 0 to 31, 32 to 63; then of the next 8

__device__ __forceinline__ void load_past(Tile& tile, const u16* keys, u64 to_values, u64 page_stride, int first, int to,
                                          const Lane& n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = first + half * 8 + n.g;
    tile.k[2 * half] = tile.k[2 * half + 1] = tile.v[2 * half] = tile.v[2 * half + 1] = make_uint4(0, 0, 0, 0);
    if (position < to) {
      const u16* at = keys + shared().pages[position / PAGE] * page_stride + (position % PAGE) * 64 + n.q * 8;
      tile.k[2 * half] = load_cached(at);
      tile.k[2 * half + 1] = load_cached(at + 32);
      tile.v[2 * half] = load_cached(at + to_values);
      tile.v[2 * half + 1] = load_cached(at + to_values + 32);
    }
  }
}

// A worker warp: its positions of the part.
__device__ __forceinline__ void attend(Tile& tile, const Past& part, const u16* keys, u64 to_values, u64 page_stride,
                                       const Lane& n) {
  Shared& s = shared();
  __syncwarp();
  int first = part.from + n.warp * TILE_POSITIONS;
  if (first < part.to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile.v[i].x = transposed(tile.v[i].x); tile.v[i].y = transposed(tile.v[i].y);
      tile.v[i].z = transposed(tile.v[i].z); tile.v[i].w = transposed(tile.v[i].w);
    }
  }
  mark(3);
  bar_sync<2, WITH_HELPER>();
  mark(4);
  if (first < part.to) {
    uint4 q0 = make_uint4(0, 0, 0, 0), q1 = q0;
    if (n.g < 2) {
      q0 = *reinterpret_cast<const uint4*>(&s.query[n.g][n.q * 8]);
      q1 = *reinterpret_cast<const uint4*>(&s.query[n.g][32 + n.q * 8]);
    }
    float m = -INFINITY, l = 0.f, acc[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
#pragma unroll 1
    for (;;) {
      float c[2][4], p[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        c[half][0] = c[half][1] = c[half][2] = c[half][3] = 0.f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(c[half], q0.x, 0, q0.y, 0, tile.k[2 * half].x, tile.k[2 * half].y);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(c[half], q0.z, 0, q0.w, 0, tile.k[2 * half].z, tile.k[2 * half].w);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(c[half], q1.x, 0, q1.y, 0, tile.k[2 * half + 1].x, tile.k[2 * half + 1].y);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(c[half], q1.z, 0, q1.w, 0, tile.k[2 * half + 1].z, tile.k[2 * half + 1].w);
      float most = m;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p[half][e] = c[half][e] + __shfl_xor_sync(FULL, c[half][e], 4);
          if (first + half * 8 + 2 * n.q + e >= part.to) p[half][e] = -INFINITY;
          most = fmaxf(most, p[half][e]);
        }
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
      const float keep = exp2_fast(m - most);
      m = most;
      l *= keep;
      u32 weights[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        p[half][0] = exp2_fast(p[half][0] - m);
        p[half][1] = exp2_fast(p[half][1] - m);
        l += p[half][0] + p[half][1];
        const u32 upper = pair_of(p[half][0], p[half][1]);
        const u32 lower = pair_of(p[half][0] - low(upper), p[half][1] - high(upper));
        weights[half] = n.g == 0 ? upper : n.g == 1 ? lower : 0u;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) { acc[i][0] *= keep; acc[i][1] *= keep; }
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const uint4 &v0 = tile.v[block], &v1 = tile.v[2 + block];
        multiply(acc[4 * block], weights[0], 0, weights[1], 0, v0.x, v1.x);
        multiply(acc[4 * block + 1], weights[0], 0, weights[1], 0, v0.y, v1.y);
        multiply(acc[4 * block + 2], weights[0], 0, weights[1], 0, v0.z, v1.z);
        multiply(acc[4 * block + 3], weights[0], 0, weights[1], 0, v0.w, v1.w);
      }
      first += PASS;
      if (first >= part.to) break;
      load_past(tile, keys, to_values, page_stride, first, part.to, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tile.v[i].x = transposed(tile.v[i].x); tile.v[i].y = transposed(tile.v[i].y);
        tile.v[i].z = transposed(tile.v[i].z); tile.v[i].w = transposed(tile.v[i].w);
      }
    }
    l += __shfl_xor_sync(FULL, l, 1);
    l += __shfl_xor_sync(FULL, l, 2);
    if (n.g < 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float4*>(&s.merge[n.warp][n.g][2 * (n.q * 8 + 2 * i)]) =
            make_float4(acc[i][0], acc[4 + i][0], acc[i][1], acc[4 + i][1]);
    }
    if (n.lane == 0) s.scale[n.warp] = make_float2(m, l);
  }
  bar_arrive<3, WITH_HELPER>();
  mark(5);
}

// The helper warp, one layer: lane has dimensions d and d + 32 of its head.
__device__ __forceinline__ void help(const Args& a, const Past& part, int head, int split, u32 epoch, int lane) {
  Shared& s = shared();
  const u64* made = a.words + WORDS_QKV;
  const bool has_new = split == 0;  // part 0 has the new position
  const u64 q = take_pair(made + head * 32 + lane, epoch);
  mark(0);
  const float q0 = first_of(q), q1 = second_of(q);
  const u32 upper = pair_of(q0, q1), lower = pair_of(q0 - low(upper), q1 - high(upper));
  s.query[0][lane] = (u16)upper; s.query[0][lane + 32] = (u16)(upper >> 16);
  s.query[1][lane] = (u16)lower; s.query[1][lane + 32] = (u16)(lower >> 16);
  __syncwarp();
  bar_arrive<2, WITH_HELPER>();
  float own = -INFINITY, v0 = 0.f, v1 = 0.f;
  if (has_new) {
    const u64* of_group = made + (HEADS + head / GROUP) * 32 + lane;
    u64 k, v;
    do {
      k = peek(of_group);
      v = peek(of_group + KV_HEADS * 32);
    } while (!is_new_pair(k, epoch) || !is_new_pair(v, epoch));
    v0 = first_of(v); v1 = second_of(v);
    own = warp_sum(q0 * first_of(k) + q1 * second_of(k));
  }
  mark(1);
  bar_sync<3, WITH_HELPER>();
  mark(2);
  const int warps = min(WARPS, max(0, (part.to - part.from + TILE_POSITIONS - 1) / TILE_POSITIONS));
  float2 scale = make_float2(-INFINITY, 0.f);
  if (lane < warps) scale = s.scale[lane];
  float m = scale.x;
#pragma unroll
  for (int d = 8; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, d));
  m = fmaxf(__shfl_sync(FULL, m, 0), own);
  const float weight = exp2_fast(scale.x - m), mine = has_new ? exp2_fast(own - m) : 0.f;
  s.weight[lane] = weight;
  float sum = lane < warps ? weight * scale.y : 0.f, y0 = mine * v0, y1 = mine * v1;
  __syncwarp();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float of = s.weight[w];
    const float2 upper = *reinterpret_cast<const float2*>(&s.merge[w][0][2 * lane]);
    const float2 lower = *reinterpret_cast<const float2*>(&s.merge[w][1][2 * lane]);
    y0 = fmaf(of, upper.x + lower.x, y0);
    y1 = fmaf(of, upper.y + lower.y, y1);
  }
#pragma unroll
  for (int d = 8; d; d >>= 1) sum += __shfl_xor_sync(FULL, sum, d);
  sum = __shfl_sync(FULL, sum, 0) + mine;
  const int slot = head * SPLITS + split;
  put_pair(a.words + WORDS_PARTS + slot * 32 + lane, __fdividef(y0, sum), __fdividef(y1, sum), epoch);
  if (lane == 0) put_one(a.words + WORDS_SCALES + slot, __float_as_uint(m + __log2f(sum)), epoch);
  mark(3);
}

// A worker warp takes the head of its own number: the parts' numbers d and d + 32, joined, into y.
__device__ __forceinline__ void take_parts(const u64* words, int splits, u32 epoch, const Lane& n, float& y0, float& y1) {
  const u64* parts = words + WORDS_PARTS + n.warp * SPLITS * 32 + n.lane;
  const u64* scales = words + WORDS_SCALES + n.warp * SPLITS + min(n.lane, splits - 1);
  float all = -INFINITY, sum = 0.f;
  y0 = y1 = 0.f;
  u64 scale = 0;
#pragma unroll 1
  for (int i = 0; i < splits; i += 4) {
    u64 y[4];
    for (bool waiting = true; waiting;) {
      if (i == 0) scale = peek(scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = peek(parts + min(i + j, splits - 1) * 32);
      waiting = !is_new(scale, epoch);
#pragma unroll
      for (int j = 0; j < 4; ++j) waiting |= !is_new_pair(y[j], epoch);
    }
    __syncwarp();
    mark(7);
    float of[4], next = all;
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = __shfl_sync(FULL, __uint_as_float((u32)scale), min(i + j, splits - 1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= splits) of[j] = -INFINITY;
      next = fmaxf(next, of[j]);
    }
    const float keep = exp2_fast(all - next);
    all = next;
    sum *= keep; y0 *= keep; y1 *= keep;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float p = exp2_fast(of[j] - next);
      sum += p;
      y0 = fmaf(p, first_of(y[j]), y0);
      y1 = fmaf(p, second_of(y[j]), y1);
    }
  }
  y0 = __fdividef(y0, sum);
  y1 = __fdividef(y1, sum);
}
