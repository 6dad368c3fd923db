// Per-thread scratch memory, aligned to cache lines: allocated piece by piece, freed all at once.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "abi.h"

namespace regard {
namespace {

class Arena {
 public:
  ~Arena() { release(); }

  // Allocates memory for `count` elements. Throws std::bad_alloc (see `out_of_memory`) if there is not enough.
  template <class T = float>
  T* take(int64_t count) {
    if (uint64_t(count) > uint64_t(INT64_MAX) / 2 / sizeof(T)) out_of_memory(SIZE_MAX);
    const size_t bytes = (size_t(count) * sizeof(T) + 127) / 64 * 64;
    if (used_ + bytes > size_) grow(bytes);
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
    total_ += bytes;
    return piece;
  }

  // Called after a block. Replaces several pieces with a single one, so the next block of this size needs at most one
  // allocation.
  void rewind() {
    if (wanted_ < total_) wanted_ = total_;
    if (older_) release();
    used_ = total_ = 0;
  }

  // Called after an item. Releases large pieces, because the thread may continue with a smaller call.
  void finish() {
    rewind();
    if (wanted_ > KEEP) wanted_ = KEEP;
    if (size_ > KEEP) release();
  }

 private:
  static constexpr size_t KEEP = size_t(8) << 20;  // maximum size kept between items
  static constexpr size_t MIN_PIECE = size_t(256) << 10;
  struct Header {
    char* older;
  };

  void grow(size_t bytes) {
    // the first piece is as large as the largest block so far; later pieces are as large as the one before, up to KEEP
    size_t size = base_ ? size_ : wanted_;
    if (size > KEEP && base_) size = KEEP;
    if (size < MIN_PIECE) size = MIN_PIECE;
    if (size < bytes) size = bytes;
    void* fresh = nullptr;
    if (posix_memalign(&fresh, 64, size + 64)) {
      size = bytes;
      if (posix_memalign(&fresh, 64, size + 64)) out_of_memory(bytes);
    }
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
  size_t size_ = 0, used_ = 0;     // size of the newest piece, and bytes used in it
  size_t total_ = 0, wanted_ = 0;  // bytes allocated by this block, and by the largest block
};

thread_local Arena arena;
thread_local Arena item_arena;  // memory that the blocks of an item share

// Guards that free the scratch memory at the end of a block or an item, even if an exception is thrown.
struct BlockScratch {
  ~BlockScratch() { arena.rewind(); }
};
struct ItemScratch {
  ~ItemScratch() {
    arena.finish();
    item_arena.finish();
  }
};

}  // namespace
}  // namespace regard
