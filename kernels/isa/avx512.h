// AVX-512: 16 floats per vector, 32 registers.
#pragma once

#include <immintrin.h>

#include "../abi.h"

namespace regard {
namespace {

constexpr int W = 16, MAX_VECTORS = 4;
constexpr int tall(int V) { return V <= 2 ? 12 : V == 3 ? 8 : 6; }

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef int16_t shorts __attribute__((vector_size(4 * W)));

INLINE vec max(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec min(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE bool any(ivec x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }
INLINE vec square_root(vec x) { return (vec)_mm512_sqrt_ps((__m512)x); }

// 1 / x: a 14-bit estimate, refined by one Newton step.
INLINE vec reciprocal(vec x) {
  const vec guess = (vec)_mm512_rcp14_ps((__m512)x);
  return guess + guess * (1.0f - x * guess);
}

// fraction · 2^n if !(x < lowest), otherwise 0. `shifted` is n + 1.5 · 2^23.
INLINE vec scale_by_power(vec fraction, vec n, vec, vec x, float lowest) {
  const __mmask16 live = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_scalef_ps(live, (__m512)fraction, (__m512)n);
}

// Converts up to `count` float16 values to float, in whole vectors; returns how many were converted.
INLINE int64_t widen_halves(float* to, const uint16_t* from, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  return i;
}

// Converts to float16, rounding to nearest even.
INLINE void narrow_halves(uint16_t* to, vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

// Reads W pairs of int8 as W pairs of int16.
INLINE shorts widen_bytes(const int8_t* from) {
  return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Reads W int8 values as floats.
INLINE vec widen_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Adds the products of two pairs of int16 to each lane.
INLINE ivec add_pairs(ivec sum, shorts a, shorts b) {
#ifdef __AVX512VNNI__
  return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}

}  // namespace
}  // namespace regard
