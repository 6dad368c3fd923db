// The vectors of one instruction set: the compiler's vector types, and functions on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// isa/NAME.h defines W, the number of lanes in a vector; MAX_VECTORS, the maximum number of vectors in a tile; tall(V),
// the number of rows that fit into registers for a tile of V vectors; vec, ivec, uvec and shorts (2 W values); max and
// min, which return their second argument if the first is NaN; any, square_root, scale_by_power, widen_halves,
// narrow_halves, widen_bytes, widen_int8 and add_pairs; and reciprocal, 1 / x for values that are neither tiny nor
// huge. If it defines MULTIPLIES_PAIRS, it also defines add_pairs for pairs of bfloat16; if it defines
// MULTIPLIES_TILES, the operations on tiles that amx_product.h uses.
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
// clang-format off
#include TEXT(isa/ISA.h)
// clang-format on

#include "abi.h"

namespace regard {
namespace {

typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));

constexpr float INF = __builtin_inff();

INLINE vec load(const float* from) { return *reinterpret_cast<const loose*>(from); }
INLINE void store(float* to, vec x) { *reinterpret_cast<loose*>(to) = x; }
INLINE ivec load(const int32_t* from) { return *reinterpret_cast<const ivec*>(from); }
INLINE uvec load(const uint32_t* from) { return *reinterpret_cast<const uvec*>(from); }
INLINE vec splat(float x) { return x - vec{}; }

// Rounds to bfloat16, to nearest even, in the upper half of each lane. Not for NaN.
INLINE uvec round_to_bfloat16(vec x) {
  const uvec bits = (uvec)x;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
}

#if defined(MULTIPLIES_PAIRS) || defined(MULTIPLIES_TILES)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif
#ifndef MULTIPLIES_PAIRS  // not called
INLINE vec add_pairs(vec sum, uvec, uvec) { return sum; }
#endif

// Whether all values are finite.
INLINE bool all_finite(const float* x, int64_t count) {
  vec zero[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) zero[k] += load(x + i + k * W) * 0.0f;
  for (; i + W <= count; i += W) zero[0] += load(x + i) * 0.0f;
  float rest = 0;
  for (; i < count; ++i) rest += x[i] * 0.0f;
  const vec all = (zero[0] + zero[1]) + (zero[2] + zero[3]);
  return !any(all != 0.0f) && rest == 0;
}

INLINE float sum(vec x) {
  float lanes[W];
  store(lanes, x);
  for (int step = W / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
}

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// 2^(c · x) for c · x ≤ 127: c · x = n + f with integer n and |f| ≤ ½; 2^f is a minimax polynomial of degree 6 with a
// relative error of 2e-9. The result is exactly 1 at 0, and 0 if it would be below 2^−100: products with smaller
// values would soon be subnormal and a hundred times slower. NaN stays NaN.
struct Power {
  float c, lowest;

  explicit Power(float c) : c(c), lowest(-100.0f / c) {}

  INLINE vec operator()(vec x) const {
    const vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    const vec t = max(splat(lowest), x), shifted = t * c + magic, n = shifted - magic, f = t * c - n;
    vec p = splat(1.5345812e-4f);
    p = p * f + 1.3399931e-3f;
    p = p * f + 9.6184891e-3f;
    p = p * f + 5.5503286e-2f;
    p = p * f + 2.4022646e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return scale_by_power(p, n, shifted, x, lowest);
  }
};

INLINE vec exp(vec x) { return Power(LOG2E)(min(splat(87.0f), x)); }

// Natural logarithm of a positive number or NaN: x = m · 2^n with m in [√½, √2), and log m is the series of
// 2 artanh((m − 1) / (m + 1)), whose argument is below 0.172.
INLINE vec log(vec x) {
  const uvec bits = (uvec)x;
  const ivec n = (ivec)(bits - 0x3f3504f3u) >> 23;
  const vec m = (vec)(bits - ((uvec)n << 23));
  const vec s = (m - 1.0f) / (m + 1.0f), z = s * s;
  vec p = splat(0.2399f);
  p = p * z + 0.28571f;
  p = p * z + 0.4f;
  p = p * z + 0.66666667f;
  const vec result = __builtin_convertvector(n, vec) * LN2 + (s * 2.0f + s * z * p);
  return x == x ? result : x;
}

// tanh and its derivative 1 − tanh²: a polynomial near zero; elsewhere 1 − r and r (2 − r) with r = 2 / (1 + exp(2x)),
// which lose no digits if tanh is close to 1.
INLINE vec tanh(vec x, vec& slope) {
  const vec sign = (vec)((ivec)x & int32_t(0x80000000)), y = (vec)((ivec)x & 0x7fffffff), z = x * x;
  vec p = splat(-5.6793290e-3f);
  p = p * z + 2.0618145e-2f;
  p = p * z - 5.3734007e-2f;
  p = p * z + 1.3331384e-1f;
  p = p * z - 3.3333280e-1f;
  const vec near = x + x * z * p;
  const vec r = 2.0f * reciprocal(1.0f + Power(2 * LOG2E)(min(splat(40.0f), y)));
  const vec far = (vec)((ivec)(1.0f - r) | (ivec)sign);
  const auto small = y < 0.625f;
  slope = small ? 1.0f - near * near : r * (2.0f - r);
  return small ? near : far;
}

// tanh with an absolute error of 1e-7: accurate enough for sums of many terms.
INLINE vec tanh(vec x) { return 1.0f - 2.0f * reciprocal(1.0f + Power(2 * LOG2E)(min(splat(40.0f), x))); }

// Transposes W vectors in place, in log₂ W rounds, each of which swaps the off-diagonal S × S blocks.
template <int... I>
struct Lanes {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  using type = Lanes<I...>;
};

template <int S, int... I>
INLINE void exchange(vec& a, vec& b, Lanes<I...>) {
  const vec upper = __builtin_shufflevector(a, b, ((I & S) ? W + I - S : I)...);
  b = __builtin_shufflevector(a, b, ((I & S) ? W + I : I + S)...);
  a = upper;
}

template <int S = W / 2>
INLINE void transpose(vec* x) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & S)) exchange<S>(x[i], x[i + S], typename Count<W>::type{});
  if constexpr (S > 1) transpose<S / 2>(x);
}

// Horizontal sums of W vectors: the sum of x[i] goes to lane i of x[0]. Each round halves the number of vectors.
template <int S = W / 2>
INLINE void sum_each(vec* x) {
#pragma GCC unroll 16
  for (int i = 0; i < S; ++i) {
    exchange<S>(x[i], x[i + S], typename Count<W>::type{});
    x[i] += x[i + S];
  }
  if constexpr (S > 1) sum_each<S / 2>(x);
}

}  // namespace
}  // namespace regard
