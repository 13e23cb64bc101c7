// The resident kernel of the speech LM on an emulated GPU, as a library.
#include "gpu.h"
#include "lm_persistent.cu"
#include "lm_persistent_attention.cu"
#include "lm_persistent_sampling.cu"
#include "lm_persistent_layer.cu"
#include "lm_persistent_decode.cu"

static const Args* arguments;
static void entry() {
  decode(*arguments);
  now->done = true;
  for (;;) yield();
}

extern "C" int shared_bytes() { return sizeof(Shared); }
// Passes over all blocks until every thread had ended; -1 where they have not within `most_passes`.
extern "C" long long run(const Args* args, int seed, long long most_passes) {
  arguments = args;
  return run_grid(entry, GRID, THREADS + 64, sizeof(Shared), seed, most_passes);
}
