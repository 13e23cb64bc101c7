// The sampling rule of the resident kernel on an emulated GPU, as a library: every block draws for a row of its own.
#include "gpu.h"
#include "lm_persistent.cu"
#include "lm_persistent_sampling.cu"

struct Row { Rule rule; int recent[RECENT]; };

static const Row* rows;
static const u64* words;  // [rows, VOCAB], of epoch 1
static int* drawn;
static void entry() {
  Shared& s = shared();
  const int t = threadIdx.x, b = blockIdx.x;
  if (t == 0) s.rule = rows[b].rule;
  for (int i = t; i < RECENT; i += THREADS) s.recent[i] = rows[b].recent[i];
  sync_workers();
  const int id = sample(words + (size_t)b * VOCAB, 1, 0, t);
  if (t == 0) drawn[b] = id;
  now->done = true;
  for (;;) yield();
}

// Passes over all rows, as for `run` of the whole kernel.
extern "C" long long draw_rows(const Row* row, const u64* word, int* ids, int count, int seed, long long most_passes) {
  rows = row;
  words = word;
  drawn = ids;
  return run_grid(entry, count, THREADS, sizeof(Shared), seed, most_passes);
}
