// AVX-512 with instructions that multiply and add pairs of bfloat16, and of int16 (VNNI). On Zen 4 and newer, products
// of bfloat16 run at twice the rate of float32; on Intel's processors at half the rate, so `available` prefers avx512
// there (see module.cpp).
#pragma once

#include "avx512.h"

#define MULTIPLIES_PAIRS

namespace regard {
namespace {

// Adds the products of two pairs of bfloat16 to each lane.
INLINE vec add_pairs(vec sum, uvec a, uvec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

}  // namespace
}  // namespace regard
