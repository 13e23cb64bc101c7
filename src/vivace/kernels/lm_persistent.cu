// Decodes one row of the speech LM, several tokens per launch, in one kernel whose blocks stay resident.
//
// Every block owns a share of every matrix. Its weights lie in one contiguous stream in the order in which it needs them,
// and one thread copies that stream into a ring in shared memory without ever waiting for the arithmetic. What the phases
// of a layer make is exchanged through global memory in words of 8 bytes that carry the number of the layer and step (the
// epoch) beside the data: whoever needs a word reads it until the epoch is right. Most words hold two numbers of 24 bits.
//
//   1  norm, query-key-value rows, bias, rotation; keys and values into the paged cache  → words of a head
//   2  attention of one head over one part of the past                                  → words of a part
//   3  join the parts; output rows; residual                                             → words of x, all blocks read all
//   4  norm; gate and up rows; down columns of the same inner numbers                    → sums for the rows' owners
//   5  sums of all blocks; residual                                                      → words of x, all blocks read all
//
// Behind the last layer: norm, head, and the sampling rule, which one block runs for all.
//
// A warp owns 64 columns of every matrix with HIDDEN columns, so it waits for its own words of x alone. Weights come from
// the ring into registers while a warp waits. No barrier between blocks is needed: a word is written anew only by a block that has
// seen something of every block that was made after that block had read the word.

#define WARPS (HIDDEN / 64)      // warps that do products
#define THREADS (WARPS * 32)
#define WITH_HELPER (THREADS + 32)
#define SUMS 20                  // numbers from row to row of s.partial: one per warp, and gaps that keep banks apart
#define ROW_BYTES (HIDDEN * 2)
#define PAIRS (HIDDEN / 2)
#define QKV_PAIRS ((HEADS + 2 * KV_HEADS) * 32)
#define GROUP (HEADS / KV_HEADS)
#define MOST_UNITS ((INTER + GRID - 1) / GRID)
#define DOWN_CHUNKS ((MOST_UNITS + 7) / 8)   // of 8 columns
#define DOWN_BYTES (HIDDEN / 16 * DOWN_CHUNKS * 256)
#define GATE_TILES ((2 * MOST_UNITS + 15) / 16)
#define HEAD_TILES ((2 * ((VOCAB_PAIRS + GRID - 1) / GRID) + 15) / 16)
#define MOST_TILES (GATE_TILES > HEAD_TILES ? GATE_TILES : HEAD_TILES)
#define BIAS_BYTES 32
#define RING_BYTES (STAGES * CHUNK)
#define OWN_PAIRS 4              // most pairs of rows of x that a block owns
#define VPT ((VOCAB + THREADS - 1) / THREADS)
#define CANDIDATES 512
#define RECENT 64
#define X_STRIDE 16              // words from one block's words of x to the next block's: they lie in lines of their own
#define EARLY_TILES 3            // tiles of gate and up rows that are taken while a warp waits for attention
#define PRELOAD 5                // those that are taken until it waits for x
// What can be chosen when it is compiled: chunks of weights under way. More delay what the blocks exchange, one is too few.
#ifndef FLIGHT
#define FLIGHT 2
#endif
#ifndef FLIGHT_BUSY
#define FLIGHT_BUSY 4            // while the first warp does not wait for other blocks
#endif
#ifndef FLIGHT_PARTS
#define FLIGHT_PARTS 4           // while it waits for attention
#endif
#ifndef FLIGHT_SUMS
#define FLIGHT_SUMS 4            // while it waits for the down product's sums
#endif

struct Args {
  const char* weights;      // [GRID, block_bytes]
  const u16* speech;        // [VOCAB, HIDDEN]
  const float2* rotary;     // [positions, 32]
  u16* pool;                // [LAYERS, 2, num_pages, KV_HEADS, PAGE, 64]
  const int* table;         // [slots, table_width]: each row's pages
  u64* words;               // what blocks exchange, see WORDS_*
  u32* epoch;
  const int* slots;         // one number: the row; below 0 there is none
  // Of all rows, see RowState.
  int* token; int* length; long long* place; const long long* min_place; const int* kind; const long long* seed;
  const float* top_p; const int* top_k; const int* win_size; const double* tau_r; const float* temperature;
  int* recent; int* decoded; int* stop; int* remaining; int* out; int* out_count;
  long long num_pages; long long block_bytes;
  int table_width; int out_capacity; int num_steps;
};

#define X_WORDS (GRID * X_STRIDE)
#define WORDS_XO 0
#define WORDS_XD (WORDS_XO + X_WORDS)
#define WORDS_QKV (WORDS_XD + X_WORDS)
#define WORDS_PARTS (WORDS_QKV + QKV_PAIRS)
#define WORDS_SCALES (WORDS_PARTS + SPLITS * HEADS * 32)
#define WORDS_DOWN (WORDS_SCALES + SPLITS * HEADS)
#define WORDS_LOGITS (WORDS_DOWN + GRID * GRID * OWN_PAIRS)
#define WORDS_MARKS (WORDS_LOGITS + VOCAB_PAIRS * 2 + 2)  // [GRID, MARK_ROLES, MARKS] if there is PROFILE
#define MARK_ROLES 4  // the first worker warp, the last, the helper, the one that copies
#define MARKS 32
#define WORDS_TOKEN (WORDS_LOGITS + VOCAB_PAIRS * 2)

// How the row draws, and where it stands at the launch.
struct Rule {
  long long min_place, seed, place; double tau_r; float top_p, temperature; int kind, top_k, win_size, decoded, slot;
};

struct __align__(128) Shared {
  char ring[RING_BYTES];
  __align__(16) u32 x[2][PAIRS];       // in bfloat16: the number and what that left
  __align__(16) u16 h[2][DOWN_CHUNKS * 8];
  __align__(16) u16 query[2][64];
  __align__(16) float partial[(16 + 16 + MOST_TILES * 16) * SUMS];
  __align__(16) float squares[2][16];  // for query-key-value and head, for gate
  union {  // the block that samples has no part in attention
    __align__(16) float merge[WARPS][2][64];  // of a warp's part of the past: dimensions d and d + 32 side by side
    __align__(16) u32 scratch[1280];          // the sampler's
  };
  float2 scale[16];                    // its maximum and its sum
  float weight[32];
  float own[8];
  int pages[MAX_PAGES];
  int recent[RECENT];
  u64 full[STAGES];
  volatile u32 consumed[WARPS];  // chunks of all steps that a warp does not read any more
  volatile u32 flight;  // chunks of weights that may be under way now
  volatile int quit;
  volatile int next_token;
  // The sampler's.
  float block[16];
  u32 threshold; u32 count; int again; int picked;
  double scan[WARPS];
  Rule rule;
  int out_count, remaining;  // of the row, at the launch
#ifdef PROFILE
  u32 mark_time[MARK_ROLES], marks[MARK_ROLES][MARKS];
#endif
};
// Rows of s.partial.
#define OF_QKV 0
#define OF_OUT 16
#define OF_DOWN 24
#define OF_GATE 32

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(raw_shared); }
__device__ __forceinline__ void sync_workers() { bar_sync<1, THREADS>(); }

// With PROFILE: clocks between one mark and the next, by the number of the one that ends them. mark_from starts, and
// put_marks leaves the sums of the launch behind the words.
__device__ __forceinline__ int mark_role() {
  const int t = threadIdx.x;
  return t % 32 || (t && t < THREADS - 32) ? -1 : t ? (t - THREADS + 64) / 32 : 0;
}
__device__ __forceinline__ void mark(int which, bool adds = true) {
#ifdef PROFILE
  const int role = mark_role();
  if (role < 0) return;
  const u32 now = clock_now();
  if (adds) shared().marks[role][which] += now - shared().mark_time[role];
  shared().mark_time[role] = now;
#endif
}
__device__ __forceinline__ void mark_from() {
#ifdef PROFILE
  const int role = mark_role();
  if (role < 0) return;
  for (int i = 0; i < MARKS; ++i) shared().marks[role][i] = 0;
  mark(0, false);
#endif
}
__device__ __forceinline__ void put_marks(u64* words) {
#ifdef PROFILE
  const int role = mark_role();
  if (role < 0) return;
  for (int i = 0; i < MARKS; ++i) put(words + WORDS_MARKS + (blockIdx.x * MARK_ROLES + role) * MARKS + i, shared().marks[role][i]);
#endif
}

// -- words: two numbers of 24 bits (float32 cut off behind 15 binary places) and 16 bits of the epoch, or one number
// and 32 bits of the epoch
__device__ __forceinline__ void put_pair(u64* word, float a, float b, u32 epoch) {
  const u32 x = __float_as_uint(a), y = __float_as_uint(b);
  put(word, (u64)((x >> 8) | ((y & 0xff00u) << 16)) | ((u64)((y >> 16) | (epoch << 16)) << 32));
}
__device__ __forceinline__ float first_of(u64 word) { return __uint_as_float((u32)word << 8); }
__device__ __forceinline__ float second_of(u64 word) {
  return __uint_as_float(((u32)(word >> 32) << 16) | (((u32)word >> 16) & 0xff00u));
}
__device__ __forceinline__ void put_one(u64* word, u32 value, u32 epoch) { put(word, ((u64)epoch << 32) | value); }
__device__ __forceinline__ bool is_new(u64 word, u32 epoch) { return (u32)(word >> 32) == epoch; }
__device__ __forceinline__ bool is_new_pair(u64 word, u32 epoch) { return (u32)(word >> 48) == (epoch & 0xffffu); }
__device__ __forceinline__ u64 take_pair(const u64* word, u32 epoch) {
  u64 w = peek(word);
  while (!is_new_pair(w, epoch)) w = peek(word);
  return w;
}
// Before and after waits for other blocks.
__device__ __forceinline__ void set_flight(u32 chunks) {
  if (threadIdx.x == 0) shared().flight = chunks;
}

// Where the word of two neighbours of x lies.
__device__ __forceinline__ int word_of_x(int pair) {
  const int owner = ((pair + 1) * GRID - 1) / PAIRS;
  return owner * X_STRIDE + pair - owner * PAIRS / GRID;
}

// -- a block's share of every matrix, and where it lies in a layer's stream: norm, bias, query-key-value rows, output rows,
// norm, gate and up rows, down columns
#define PIECE 2048  // bytes of a tile of 16 rows that one warp reads
template <u32 UNIT> __device__ __forceinline__ u32 filled(u32 bytes) { return (bytes + UNIT - 1) / UNIT * UNIT; }
struct Share {
  int p0, qkv_rows, x0, rows, gate_rows;
  u32 at_qkv, at_out, at_norm, at_gate, at_down, bytes;
};
__device__ __forceinline__ Share share() {
  const int b = fresh(blockIdx.x);
  Share h;
  h.p0 = b * QKV_PAIRS / GRID;
  h.qkv_rows = 2 * ((b + 1) * QKV_PAIRS / GRID - h.p0);
  h.x0 = b * PAIRS / GRID;
  h.rows = 2 * ((b + 1) * PAIRS / GRID - h.x0);
  h.gate_rows = 2 * ((b + 1) * INTER / GRID - b * INTER / GRID);
  h.at_qkv = ROW_BYTES + BIAS_BYTES;
  h.at_out = h.at_qkv + h.qkv_rows * ROW_BYTES;
  h.at_norm = filled<128>(h.at_out + h.rows * ROW_BYTES);
  h.at_gate = filled<PIECE>(h.at_norm + ROW_BYTES);
  h.at_down = filled<PIECE>(h.at_gate + h.gate_rows * ROW_BYTES);
  h.bytes = h.at_down + DOWN_BYTES;
  return h;
}
// Chunks of a step: its layers, the norm, the head.
__device__ __forceinline__ u32 step_chunks() {
  const int b = fresh(blockIdx.x), head_rows = 2 * ((b + 1) * VOCAB_PAIRS / GRID - b * VOCAB_PAIRS / GRID);
  return (LAYERS * share().bytes + filled<PIECE>(ROW_BYTES) + head_rows * ROW_BYTES + CHUNK - 1) / CHUNK;
}
// Where a step is: in which layer, and where that layer's weights lie in the step's stream and in the ring.
struct Place { int layer, position; u32 epoch, chunk0, offset, base, turn; };

// -- the ring
__device__ __forceinline__ void wait_full(u32 chunk) {
  while (!has_arrived(&shared().full[chunk % STAGES], (chunk / STAGES) & 1u)) {}
}
__device__ __forceinline__ u32 ring_at(u32 at) { return at >= RING_BYTES ? at - RING_BYTES : at; }
__device__ __forceinline__ uint4 ring_16(u32 at) { return *reinterpret_cast<const uint4*>(raw_shared + ring_at(at)); }
__device__ __forceinline__ u32 ring_4(u32 at) { return *reinterpret_cast<const u32*>(raw_shared + ring_at(at)); }

__device__ __forceinline__ void place_in_ring(Place& at) {
  const u32 chunk = at.chunk0 + at.offset / CHUNK;
  at.base = chunk % STAGES * CHUNK + at.offset % CHUNK;
  at.turn = chunk / STAGES & 1u;
}
// A place in the ring, and in which of its turns (even or odd) it is meant.
struct Spot { u32 at, turn; };
__device__ __forceinline__ Spot spot(u32 at, u32 turn) {
  return at >= RING_BYTES ? Spot{at - RING_BYTES, turn ^ 1u} : Spot{at, turn};
}
__device__ __forceinline__ Spot spot(const Place& at, u32 offset) {
  const Spot once = spot(at.base + offset, at.turn);
  return spot(once.at, once.turn);
}
__device__ __forceinline__ void wait_at(const Spot& p) {
  while (!has_arrived(&shared().full[p.at / CHUNK], p.turn)) {}
}
// For bytes that may lie in two chunks.
__device__ __forceinline__ void wait_at(const Spot& p, u32 bytes) {
  const Spot end = spot(p.at + bytes - 16, p.turn);
  wait_at(p);
  wait_at(end);
}
// This warp has read all of the layer before `offset`.
__device__ __forceinline__ void release(const Place& at, u32 offset, int warp, int lane) {
  __syncwarp();
  if (lane == 0) shared().consumed[warp] = at.chunk0 + (at.offset + offset) / CHUNK;
}
// How many chunks lie between the first that some warp still reads and chunk k.
__device__ __forceinline__ int ahead(u32 k) {
  int most = (int)(k - peek_shared(&shared().consumed[0]));
#pragma unroll
  for (int w = 1; w < WARPS; ++w) most = max(most, (int)(k - peek_shared(&shared().consumed[w])));
  return most;
}

// One thread: the block's stream into the ring, as far as there is room.
__device__ __noinline__ void produce(const char* source, u32 step_chunks, u32 num_steps) {
  Shared& s = shared();
  u32 total = step_chunks * num_steps, k = 0, in_step = 0;
  for (; k < total; ++k) {
    while (ahead(k) >= STAGES)
      if (peek_shared((const volatile u32*)&s.quit)) goto drain;
    mark(0);
    const u32 flight = s.flight;
    if (k >= flight) wait_full(k - flight);
    mark(1);
    copy_chunk(s.ring + k % STAGES * CHUNK, source + (u64)in_step * CHUNK, CHUNK, &s.full[k % STAGES]);
    if (++in_step == step_chunks) in_step = 0;
    mark(2);
  }
drain:
  while (!peek_shared((const volatile u32*)&s.quit)) {}
  for (u32 j = k - ahead(k); (int)(k - j) > 0; ++j) wait_full(j);
}

// -- products with HIDDEN columns. Rows lie in pairs, in the order in which the matrix units take them: a lane's 16 bytes
// are its elements of one product of 16 rows and 16 columns. Rows beyond the last read what follows; nobody looks at their
// sums.
struct Lane { int t, lane, warp, g, q; };
__device__ __forceinline__ Lane here() {
  const int t = fresh(threadIdx.x);
  return {t, t & 31, t >> 5, (t & 31) >> 2, t & 3};
}

// A tile of 16 rows, or as many as there are: four products of 16 columns. Row g of a tile is the first of pair g, row g + 8
// the second. Every block has at least LEAST pairs.
template <int LEAST>
__device__ __forceinline__ void load_tile(uint4 (&a)[4], const Spot& rows, int pairs, int tile, const Lane& n) {
  const int left = pairs - tile * 8;
  const u32 first = rows.at + tile * WARPS * PIECE;
  if (tile * 8 + 8 <= LEAST || left >= 8) {
    const Spot p = spot(first + n.warp * PIECE, rows.turn);
    wait_at(p);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = *reinterpret_cast<const uint4*>(raw_shared + p.at + n.lane * 16 + j * 512);
  } else if (left > 0) {
    const Spot p = spot(first + n.warp * left * 256, rows.turn);
    wait_at(p, left * 256);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = ring_16(p.at + (u32)(j * left * 64 + n.lane * 16));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = make_uint4(0, 0, 0, 0);
  }
}
// Where the sums of the row lie that thread t finishes: even threads have the first of a pair, odd ones the second.
__device__ __forceinline__ int row_of(int t) { return (t >> 4) * 16 + (t >> 1 & 7) + (t & 1) * 8; }
// Two neighbours of a vector into shared memory, for this warp alone.
__device__ __forceinline__ void stage(float a, float b, const Lane& n) {
  const u32 both = pair_of(a, b);
  shared().x[0][n.t] = both;
  shared().x[1][n.t] = pair_of(a - low(both), b - high(both));
  __syncwarp();
}
__device__ __forceinline__ uint4 staged(int block, const Lane& n) {
  return *reinterpret_cast<const uint4*>(&shared().x[n.g & 1][n.warp * 32 + block * 16 + n.q * 4]);
}
// This warp's part of the sums of some rows, and of the squares, into shared memory.
template <int TILES>
__device__ __forceinline__ void rows_times_x(const uint4 (&a)[TILES][4], float* partial, float* squares, float square,
                                             const Lane& n) {
  constexpr int CHAINS = TILES == 1 ? 2 : 1;
  float c[TILES * CHAINS][4];
#pragma unroll
  for (int i = 0; i < TILES * CHAINS; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
  const uint4 x0 = staged(0, n), x1 = staged(1, n);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u32 b0 = j == 0 ? x0.x : j == 1 ? x0.z : j == 2 ? x1.x : x1.z, b1 = j == 0 ? x0.y : j == 1 ? x0.w : j == 2 ? x1.y : x1.w;
#pragma unroll
    for (int i = 0; i < TILES; ++i) multiply(c[CHAINS == 2 ? j / 2 : i], a[i][j].x, a[i][j].y, a[i][j].z, a[i][j].w, b0, b1);
    square += __shfl_xor_sync(FULL, square, 16 >> j);
  }
  square += __shfl_xor_sync(FULL, square, 1);
  if (n.q == 0) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      float first = c[i][0] + c[i][1], second = c[i][2] + c[i][3];
      if (CHAINS == 2) { first += c[1][0] + c[1][1]; second += c[1][2] + c[1][3]; }
      partial[(i * 16 + n.g) * SUMS + n.warp] = first;
      partial[(i * 16 + n.g + 8) * SUMS + n.warp] = second;
    }
  }
  if (n.lane == 0) squares[n.warp] = square;
}
__device__ __forceinline__ float sum16(const float* values) {
  float4 a = *reinterpret_cast<const float4*>(values), b = *reinterpret_cast<const float4*>(values + 4);
  float4 c = *reinterpret_cast<const float4*>(values + 8), d = *reinterpret_cast<const float4*>(values + 12);
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)) + (((c.x + c.y) + (c.z + c.w)) + ((d.x + d.y) + (d.z + d.w)));
}
// All warps' sums of a row; the entries of warps that there are not are zero.
__device__ __forceinline__ float row_sum(int row) { return sum16(shared().partial + row * SUMS); }
__device__ __forceinline__ float norm_scale(const float* squares) { return rsqrtf(sum16(squares) * (1.f / HIDDEN) + EPS); }

// Threads of warp 0: rows of x that this block owns become what they were plus their sums, and go to all. Where they go is
// found before the barrier behind which the sums are there.
struct Owner { bool has, puts; int to; };
__device__ __forceinline__ Owner own_rows() {
  const int t = fresh(threadIdx.x), rows = share().rows;
  return {fresh(t < rows) != 0, fresh(t < rows && t % 2 == 0) != 0, fresh(blockIdx.x * X_STRIDE + t / 2)};
}
__device__ __forceinline__ void put_own_rows(u64* words, const Owner& owner, int sums, u32 epoch) {
  const int t = threadIdx.x;
  if (t >= 32) return;
  float x = 0.f;
  if (owner.has) x = shared().own[t] += row_sum(sums + t);
  const float next = __shfl_down_sync(FULL, x, 1);
  if (owner.puts) put_pair(words + owner.to, x, next, epoch);
}
