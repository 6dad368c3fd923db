// AVX2 with FMA and F16C: 8 floats per vector, 16 registers.
#pragma once

#include <immintrin.h>

#include "../abi.h"

namespace regard {
namespace {

constexpr int W = 8, MAX_VECTORS = 3;
constexpr int tall(int V) { return V == 1 ? 8 : V == 2 ? 6 : 4; }

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef int16_t shorts __attribute__((vector_size(4 * W)));

INLINE vec max(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec min(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE bool any(ivec x) { return _mm256_movemask_ps((__m256)x) != 0; }
INLINE vec square_root(vec x) { return (vec)_mm256_sqrt_ps((__m256)x); }
INLINE vec reciprocal(vec x) { return 1.0f / x; }

// fraction · 2^n if !(x < lowest), otherwise 0. `shifted` is n + 1.5 · 2^23.
INLINE vec scale_by_power(vec fraction, vec, vec shifted, vec x, float lowest) {
  const vec power = (vec)(((uvec)shifted << 23) + 0x3f800000u);
  return x < lowest - vec{} ? vec{} : fraction * power;
}

// Converts up to `count` float16 values to float, in whole vectors; returns how many were converted.
INLINE int64_t widen_halves(float* to, const uint16_t* from, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  return i;
}

// Converts to float16, rounding to nearest even.
INLINE void narrow_halves(uint16_t* to, vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

// Reads W pairs of int8 as W pairs of int16.
INLINE shorts widen_bytes(const int8_t* from) {
  return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Reads W int8 values as floats.
INLINE vec widen_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// Adds the products of two pairs of int16 to each lane.
INLINE ivec add_pairs(ivec sum, shorts a, shorts b) { return sum + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

}  // namespace
}  // namespace regard
