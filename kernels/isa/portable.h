// Operations in portable C++, for instruction sets that need no intrinsics. Requires W, vec, ivec and uvec.
#pragma once

namespace regard {
namespace {

INLINE vec max(vec a, vec b) { return a > b ? a : b; }
INLINE vec min(vec a, vec b) { return a < b ? a : b; }

INLINE bool any(ivec x) {
  int32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= x[i];
  return bits != 0;
}

INLINE vec square_root(vec x) {
  for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

INLINE vec reciprocal(vec x) { return 1.0f / x; }

// fraction · 2^n if !(x < lowest), otherwise 0. `shifted` is n + 1.5 · 2^23.
INLINE vec scale_by_power(vec fraction, vec, vec shifted, vec x, float lowest) {
  const vec power = (vec)(((uvec)shifted << 23) + 0x3f800000u);
  return x < lowest - vec{} ? vec{} : fraction * power;
}

// Returns 0: no float16 values are converted, and the caller converts them one by one.
INLINE int64_t widen_halves(float*, const uint16_t*, int64_t) { return 0; }

INLINE uint16_t narrow_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return uint16_t(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));  // at least 65,536, or NaN
  if (size >= 0x38800000) return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
  float small;  // subnormal: adding 0.5 rounds to a multiple of 2^−24
  memcpy(&small, &size, 4);
  small += 0.5f;
  memcpy(&bits, &small, 4);
  return uint16_t(sign | (bits - 0x3f000000));
}

// Converts to float16, rounding to nearest even.
INLINE void narrow_halves(uint16_t* to, vec x) {
  for (int i = 0; i < W; ++i) to[i] = narrow_half(x[i]);
}

// Reads W pairs of int8 as W pairs of int16.
INLINE shorts widen_bytes(const int8_t* from) {
  typedef int8_t bytes __attribute__((vector_size(2 * W), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const bytes*>(from), shorts);
}

// Reads W int8 values as floats.
INLINE vec widen_int8(const int8_t* from) {
  typedef int8_t bytes __attribute__((vector_size(W), aligned(1), may_alias));
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const bytes*>(from), ivec), vec);
}

// Adds the products of two pairs of int16 to each lane.
INLINE ivec add_pairs(ivec sum, shorts a, shorts b) {
  const ivec low_a = ((ivec)a << 16) >> 16, low_b = ((ivec)b << 16) >> 16;
  return sum + low_a * low_b + ((ivec)a >> 16) * ((ivec)b >> 16);
}

}  // namespace
}  // namespace regard
