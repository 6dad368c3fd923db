// Memory for a thread's own work, aligned to cache lines: taken piece by piece, given back all at once.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace regard {
namespace {

class Arena {
 public:
  ~Arena() { release(); }

  template <class T = float>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + 127) / 64 * 64;
    if (used_ + bytes > size_) grow(bytes);
    T* found = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
    total_ += bytes;
    return found;
  }

  void reset() {
    if (older_ || size_ > KEEP) release();
    used_ = total_ = 0;
  }

 private:
  static constexpr size_t KEEP = size_t(8) << 20;  // more than this is not held between calls
  struct Header {
    char* older;
  };

  void grow(size_t bytes) {
    size_t size = total_ + bytes;
    if (size < 2 * size_) size = 2 * size_;
    if (size < (size_t(1) << 18)) size = size_t(1) << 18;
    void* fresh = nullptr;
    if (posix_memalign(&fresh, 64, size + 64)) abort();
    older_ = base_ ? base_ - 64 : nullptr;
    reinterpret_cast<Header*>(fresh)->older = older_;
    base_ = reinterpret_cast<char*>(fresh) + 64;
    size_ = size;
    used_ = 0;
  }

  void release() {
    char* at = base_ ? base_ - 64 : nullptr;
    while (at) {
      char* older = reinterpret_cast<Header*>(at)->older;
      free(at);
      at = older;
    }
    base_ = older_ = nullptr;
    size_ = used_ = 0;
  }

  char *base_ = nullptr, *older_ = nullptr;
  size_t size_ = 0, used_ = 0, total_ = 0;
};

thread_local Arena arena;

}  // namespace
}  // namespace regard
