// Threads and exceptions of the kernels. Only the kernels are compiled for specific instruction sets; this file is
// compiled for any processor. The threads are OpenMP's, shared with torch once torch is loaded.
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "abi.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace regard {
namespace {

// OpenMP threads do not survive a fork; waiting for them would deadlock.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// Stores its text inline, because there may be no memory for a string.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) {
    snprintf(text_, sizeof text_,
             "the attention kernels could not allocate %.1f MB of working memory. "
             "Use fewer threads (torch.set_num_threads), shorter sequences or narrower vectors, or "
             "implementation=\"tiled\", which needs less.",
             double(bytes) / 1e6);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[256];
};

#ifdef _OPENMP
// Items that run on several threads. An exception must not leave the thread that throws it, so the first is stored.
struct Items {
  void (*work)(void*, int64_t);
  void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr first;

  void run(int64_t i) noexcept {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      work(context, i);
    } catch (...) {
      if (!failed.exchange(true)) first = std::current_exception();
    }
  }
};

// Whether `threads` more threads can be started. OpenMP aborts the process if it cannot start a thread, so they are
// first started with pthreads; the system keeps their stacks for OpenMP.
bool can_start(int threads) {
  static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  constexpr size_t MARGIN = size_t(1) << 20;  // for OpenMP's own bookkeeping
  auto* started = static_cast<pthread_t*>(malloc(size_t(threads) * sizeof(pthread_t)));
  void* margin = malloc(MARGIN);
  int count = 0;
  if (started && margin) {
    pthread_mutex_lock(&gate);  // makes all threads exist at the same time
    const auto wait = [](void* lock) -> void* {
      pthread_mutex_lock(static_cast<pthread_mutex_t*>(lock));
      pthread_mutex_unlock(static_cast<pthread_mutex_t*>(lock));
      return nullptr;
    };
    while (count < threads && pthread_create(started + count, nullptr, wait, &gate) == 0) ++count;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < count; ++i) pthread_join(started[i], nullptr);
  }
  free(margin);
  free(started);
  return count == threads;
}

// Whether a team of this size can be started. The largest known size is stored per calling thread.
bool has_team(int threads) {
  thread_local int known = 1;
  if (threads > known && can_start(threads - 1)) known = threads;
  return threads <= known;
}
#endif

}  // namespace

void out_of_memory(size_t bytes) { throw OutOfMemory(bytes); }

void parallel(int64_t items, int threads, void (*work)(void*, int64_t), void* context) {
#ifdef _OPENMP
  if (threads > items) threads = int(items);
  if (threads > 1 && !forked && !omp_in_parallel() && has_team(threads)) {
    const int64_t chunk = items / (threads * 16) > 1 ? items / (threads * 16) : 1;
    Items all{work, context};
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t i = 0; i < items; ++i) all.run(i);
    if (all.failed) std::rethrow_exception(all.first);
    return;
  }
#endif
  for (int64_t i = 0; i < items; ++i) work(context, i);
}

}  // namespace regard
