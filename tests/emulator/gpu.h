// A GPU of one operating-system thread: every CUDA thread is a fiber, blocks run in random turns, copies arrive late. It
// stands in for lm_persistent_device.cu, so that kernels whose blocks wait for each other can be tested without a GPU:
// what they compute, and that they come to an end whatever the order. It knows no caches and no reordering of memory.
// x86-64 alone: the switch between fibers is written for its calling convention.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>
#include <sys/mman.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define FULL 0xffffffffu
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline void __threadfence() {}
inline void __threadfence_system() {}

struct Bar { int count = 0; u64 turn = 0; };
struct Warp { int count = 0; u64 turn = 0; u64 values[2][32][6]; };
struct Copy { char* to; const char* from; u32 bytes; u64* barrier; };
struct Block {
  char* memory;
  Bar bars[16];
  std::vector<Warp> warps;
  std::deque<Copy> copies;
};
struct Fiber { void* sp; Block* block; int tid, bid; bool done; };
static Fiber* now;
static void* scheduler_sp;
static int threads_of_block;
static std::mt19937 random_numbers;

extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
__attribute__((noinline)) static void yield() { emu_switch(&now->sp, scheduler_sp); }

struct Index { int x; };
__attribute__((noinline)) static Index emu_thread() { return {now->tid}; }
__attribute__((noinline)) static Index emu_block() { return {now->bid}; }
__attribute__((noinline)) static char* emu_shared() { return now->block->memory; }
#define threadIdx emu_thread()
#define blockIdx emu_block()
#define raw_shared emu_shared()

static void arrive(int id, int count, bool waits) {
  Bar& bar = now->block->bars[id];
  const u64 turn = bar.turn;
  if (++bar.count == count) { bar.count = 0; ++bar.turn; return; }
  if (waits) while (bar.turn == turn) yield();
}
template <int ID, int COUNT> void bar_sync() { arrive(ID, COUNT, true); }
template <int ID, int COUNT> void bar_arrive() { arrive(ID, COUNT, false); }
inline void __syncthreads() { arrive(0, threads_of_block, true); }

// All lanes leave values; returns the table of what they left.
static const u64 (*together(const u64* mine, int count))[6] {
  Warp& warp = now->block->warps[now->tid / 32];
  const u64 turn = warp.turn;
  memcpy(warp.values[turn & 1][now->tid % 32], mine, 8 * count);
  if (++warp.count == 32) { warp.count = 0; ++warp.turn; }
  else while (warp.turn == turn) yield();
  return now->block->warps[now->tid / 32].values[turn & 1];
}
template <class T> T from_lane(T value, int lane) {
  u64 mine = 0;
  memcpy(&mine, &value, sizeof(T));
  const u64 got = together(&mine, 1)[lane][0];
  T result;
  memcpy(&result, &got, sizeof(T));
  return result;
}
template <class T> T __shfl_sync(u32, T v, int lane) { return from_lane(v, lane & 31); }
template <class T> T __shfl_xor_sync(u32, T v, int d) { return from_lane(v, (now->tid & 31) ^ d); }
template <class T> T __shfl_up_sync(u32, T v, int d) { const int lane = now->tid & 31; return from_lane(v, lane < d ? lane : lane - d); }
template <class T> T __shfl_down_sync(u32, T v, int d) { const int lane = now->tid & 31; return from_lane(v, lane + d > 31 ? lane : lane + d); }
inline void __syncwarp() { const u64 none = 0; together(&none, 1); }
inline u32 __ballot_sync(u32, bool v) {
  const u64 mine = v;
  const auto all = together(&mine, 1);
  u32 bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (u32)(all[i][0] != 0) << i;
  return bits;
}
inline int __reduce_add_sync(u32, int v) {
  const u64 mine = (u32)v;
  const auto all = together(&mine, 1);
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += (int)all[i][0];
  return sum;
}
inline int __reduce_max_sync(u32, int v) {
  const u64 mine = (u32)v;
  const auto all = together(&mine, 1);
  int most = v;
  for (int i = 0; i < 32; ++i) most = max(most, (int)all[i][0]);
  return most;
}
inline u32 atomicAdd(u32* at, u32 v) { const u32 old = *at; *at += v; return old; }

inline float low(u32 pair) { return __uint_as_float(pair << 16); }
inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline u32 rounded(float f) {
  const u32 v = __float_as_uint(f);
  if ((v & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (v + 0x7fffu + ((v >> 16) & 1u)) >> 16;
}
inline u32 pair_of(float a, float b) { return rounded(a) | (rounded(b) << 16); }
inline float exp2_fast(float x) { return exp2f(x); }

inline int fresh(int v) { return v; }
inline void put(u64* word, u64 value) { *(volatile u64*)word = value; }
inline u64 peek(const u64* word) { yield(); return *(const volatile u64*)word; }
inline void peek2(const u64* word, u64& a, u64& b) { yield(); a = ((const volatile u64*)word)[0]; b = ((const volatile u64*)word)[1]; }
inline uint4 load_cached(const u16* at) { uint4 v; memcpy(&v, at, 16); return v; }

inline void arrival_init(u64* barrier) { *barrier = 0; }
inline void arrival_init_done() {}
static void deliver() {
  auto& copies = now->block->copies;
  if (copies.empty() || random_numbers() % 4) return;
  const Copy c = copies.front();
  copies.pop_front();
  memcpy(c.to, c.from, c.bytes);
  ++*c.barrier;
}
inline bool has_arrived(u64* barrier, u32 parity) {
  if ((*(volatile u64*)barrier & 1u) != parity) return true;
  deliver();
  yield();
  return false;
}
inline void copy_chunk(char* to, const char* from, u32 bytes, u64* barrier) {
  memset(to, 0xff, bytes);  // what was there must not be needed any more
  now->block->copies.push_back({to, from, bytes, barrier});
}
inline u32 clock_now() { static u32 now; return ++now; }
inline u32 peek_shared(const volatile u32* at) { yield(); return *at; }

inline float bf(u64 v, int half) { return __uint_as_float((u32)(half ? v >> 16 : v) << 16); }
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u64 mine[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = together(mine, 6);
  const int lane = now->tid & 31, g = lane / 4, q = lane % 4;
  for (int row = 0; row < 2; ++row)
    for (int e = 0; e < 2; ++e) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) {
        const u64 av = all[g * 4 + k % 8 / 2][row + 2 * (k / 8)], bv = all[(2 * q + e) * 4 + k % 8 / 2][4 + k / 8];
        sum += (double)bf(av, k & 1) * (double)bf(bv, k & 1);
      }
      c[row * 2 + e] += (float)sum;
    }
}
inline u32 transposed(u32 pair) {
  const u64 mine = pair;
  const auto all = together(&mine, 1);
  const int lane = now->tid & 31, g = lane / 4, q = lane % 4;
  u32 out = 0;
  for (int e = 0; e < 2; ++e) {
    const u64 v = all[(2 * q + e) * 4 + g / 2][0];
    out |= (u32)((g & 1 ? v >> 16 : v) & 0xffffu) << (16 * e);
  }
  return out;
}
inline float warp_sum(float v) {
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
  return v;
}

// Runs `entry` as every thread of `grid` blocks. Passes over all blocks, or -1 where some thread did not end.
static long long run_grid(void (*entry)(), int grid, int threads, size_t shared_size, int seed, long long most_passes) {
  random_numbers.seed(seed);
  threads_of_block = threads;
  const size_t stack = 16384, total = (size_t)grid * threads;
  char* stacks = (char*)mmap(nullptr, total * stack, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return -1;
  std::vector<Fiber> fibers(total);
  std::vector<Block> blocks(grid);
  for (int b = 0; b < grid; ++b) {
    blocks[b].memory = (char*)aligned_alloc(128, (shared_size + 127) / 128 * 128);
    memset(blocks[b].memory, 0xff, shared_size);
    blocks[b].warps.resize(threads / 32);
    for (int t = 0; t < threads; ++t) {
      void** sp = (void**)(stacks + ((size_t)b * threads + t + 1) * stack);
      *--sp = nullptr;
      *--sp = (void*)entry;
      sp -= 6;
      fibers[(size_t)b * threads + t] = {sp, &blocks[b], t, b, false};
    }
  }
  std::vector<int> alive(grid, threads);
  long long passes = 0;
  size_t left = total;
  for (; left && passes < most_passes; ++passes) {
    for (int b = 0; b < grid; ++b) {
      if (!alive[b] || random_numbers() % 3 == 0) continue;
      const int turns = 1 + random_numbers() % 4;
      for (int k = 0; k < turns; ++k)
        for (int t = 0; t < threads; ++t) {
          Fiber& f = fibers[(size_t)b * threads + t];
          if (f.done) continue;
          now = &f;
          emu_switch(&scheduler_sp, f.sp);
          if (f.done) { --alive[b]; --left; }
        }
    }
  }
  for (auto& b : blocks) free(b.memory);
  munmap(stacks, total * stack);
  return left ? -1 : passes;
}
