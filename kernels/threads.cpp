// The one place that has threads: OpenMP's, which are torch's own once torch is loaded.
#include <pthread.h>

#include <atomic>

#include "problem.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace regard {
namespace {

// OpenMP's threads do not survive a fork, and waiting for them would never end.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

void parallel(int64_t items, int threads, void (*work)(void*, int64_t), void* context) {
#ifdef _OPENMP
  if (threads > items) threads = int(items);
  if (threads > 1 && !forked && !omp_in_parallel()) {
    const int64_t chunk = items / (threads * 16) > 1 ? items / (threads * 16) : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t i = 0; i < items; ++i) work(context, i);
    return;
  }
#endif
  for (int64_t i = 0; i < items; ++i) work(context, i);
}

}  // namespace regard
