// AVX-512 with AMX emulated in C++, to test amx_product.h on processors without AMX. Not part of wheels.
#pragma once

#include "avx512.h"

#define MULTIPLIES_TILES

namespace regard {
namespace {

struct EmulatedTiles {
  alignas(64) float rows[8][16][16];
  bool configured;

  // A tile instruction is illegal unless the thread's tiles are configured.
  INLINE float (*use(int tile))[16] {
    if (!configured) __builtin_trap();
    return rows[tile];
  }
};
thread_local EmulatedTiles emulated;

INLINE void configure_tiles() {
  if (emulated.configured) __builtin_trap();  // the inner scope would release the tiles of the outer one
  memset(&emulated, 0, sizeof emulated);
  emulated.configured = true;
}

INLINE void release_tiles() { memset(&emulated, 0, sizeof emulated); }

INLINE void tile_zero(int tile) { memset(emulated.use(tile), 0, 1024); }

INLINE void tile_load(int tile, const float* from, ptrdiff_t step) {
  for (int i = 0; i < 16; ++i) memcpy(emulated.use(tile)[i], from + i * step, 64);
}

INLINE void tile_store(int tile, float* to, ptrdiff_t step) {
  for (int i = 0; i < 16; ++i) memcpy(to + i * step, emulated.use(tile)[i], 64);
}

// Replaces subnormal numbers with zeros, as the processor does with operands and results.
INLINE vec flush(vec x) { return ((uvec)x & 0x7f800000u) == 0u ? (vec)((uvec)x & 0x80000000u) : x; }

// TDPBF16PS (Intel SDM, volume 2): the first and the second elements of the pairs are summed separately.
INLINE void tile_dot(int to, int a, int b) {
  float (*left)[16] = emulated.use(a), (*right)[16] = emulated.use(b), (*sums)[16] = emulated.use(to);
  for (int i = 0; i < 16; ++i) {
    vec first{}, second{}, sum;
    for (int k = 0; k < 16; ++k) {
      uint32_t word;
      uvec words;
      memcpy(&word, left[i] + k, sizeof word);
      memcpy(&words, right[k], sizeof words);
      const uvec both = uvec{} + word;
      first = flush(first + flush((vec)(both << 16)) * flush((vec)(words << 16)));
      second = flush(second + flush((vec)(both & 0xffff0000u)) * flush((vec)(words & 0xffff0000u)));
    }
    memcpy(&sum, sums[i], sizeof sum);
    sum = flush(flush(sum) + flush(first + second));
    memcpy(sums[i], &sum, sizeof sum);
  }
}

}  // namespace
}  // namespace regard
