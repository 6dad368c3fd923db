// AVX-512 with products of bfloat16 pairs. On Zen 4 and newer, they run at twice the rate of float32; on Intel's
// processors at half the rate, so `available` prefers avx512 there (see module.cpp).
#pragma once

#include "avx512.h"

#define MULTIPLIES_PAIRS

namespace regard {
namespace {

// Adds the products of two pairs of bfloat16 to each lane.
INLINE vec add_pairs(vec sum, uvec a, uvec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

// Rounds two vectors to bfloat16 and interleaves them: (even[0], odd[0]), (even[1], odd[1]), …
INLINE uvec to_pairs(vec even, vec odd) {
  alignas(64) static constexpr uint16_t ORDER[2 * W] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (uvec)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
}

}  // namespace
}  // namespace regard
