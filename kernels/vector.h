// One vector of the instruction set that this file is compiled for, by means of the compiler's own vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "problem.h"

namespace regard {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16, MOST = 4;  // lanes of a vector; vectors in a tile
#elif defined(__AVX2__)
constexpr int W = 8, MOST = 3;
#elif defined(__aarch64__)
constexpr int W = 4, MOST = 4;
#else
constexpr int W = 4, MOST = 3;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));

constexpr float INF = __builtin_inff();

INLINE vec load(const float* from) { return *reinterpret_cast<const loose*>(from); }
INLINE void store(float* to, vec x) { *reinterpret_cast<loose*>(to) = x; }
INLINE ivec load(const int32_t* from) { return *reinterpret_cast<const ivec*>(from); }
INLINE uvec load(const uint32_t* from) { return *reinterpret_cast<const uvec*>(from); }
INLINE vec splat(float x) { return x - vec{}; }

// The larger and the smaller; of a NaN and a number, the second argument.
INLINE vec max(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
INLINE vec min(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

INLINE bool any(ivec x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)x) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found |= x[i];
  return found != 0;
#endif
}

// Whether none of these numbers is infinite or NaN.
INLINE bool all_finite(const float* x, int count) {
  vec zero[4] = {};
  int i = 0;
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

INLINE vec square_root(vec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vec)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// 1 / x for a number that is neither tiny nor huge: an estimate of 14 bits, and one step of Newton's method.
INLINE vec reciprocal(vec x) {
#if defined(__AVX512F__)
  const vec guess = (vec)_mm512_rcp14_ps((__m512)x);
  return guess + guess * (1.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// 2^(c · x) for c · x ≤ 127: c · x = n + f with n whole and |f| ≤ ½, and 2^f by the best polynomial of degree
// 6, whose relative error is 2e-9. It is 1 at 0, and 0 below 2^−100, since products with less than that would
// soon be subnormal, which takes processors a hundred times as long. NaN stays NaN.
struct Power {
  float c, least;

  explicit Power(float c) : c(c), least(-100.0f / c) {}

  INLINE vec operator()(vec x) const {
    const vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to a whole number
    const vec t = max(splat(least), x), shifted = t * c + magic, n = shifted - magic, f = t * c - n;
    vec p = splat(1.5345812e-4f);
    p = p * f + 1.3399931e-3f;
    p = p * f + 9.6184891e-3f;
    p = p * f + 5.5503286e-2f;
    p = p * f + 2.4022646e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 live = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(least), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(live, (__m512)p, (__m512)n);
#else
    const vec power = (vec)(((uvec)shifted << 23) + 0x3f800000u);
    return x < splat(least) ? vec{} : p * power;
#endif
  }
};

INLINE vec exp(vec x) { return Power(LOG2E)(min(splat(87.0f), x)); }

// The natural logarithm of a positive number, or of NaN: m · 2^n with m in [√½, √2), and the series of the inverse
// hyperbolic tangent of (m − 1) / (m + 1), whose argument is below 0.172.
INLINE vec log(vec x) {
  const uvec bits = (uvec)x;
  const ivec n = (ivec)(bits - 0x3f3504f3u) >> 23;
  const vec m = (vec)(bits - ((uvec)n << 23));
  const vec s = (m - 1.0f) / (m + 1.0f), z = s * s;
  vec p = splat(0.2399f);
  p = p * z + 0.28571f;
  p = p * z + 0.4f;
  p = p * z + 0.66666667f;
  const vec found = __builtin_convertvector(n, vec) * LN2 + (s * 2.0f + s * z * p);
  return x == x ? found : x;
}

// tanh and its derivative 1 − tanh². Near zero a polynomial; beyond, with r = 2 / (1 + exp(2x)), they are 1 − r
// and r (2 − r), which lose no digits where tanh is nearly 1.
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

// tanh to within 1e-7, and not relative to itself: enough where many of them are summed up.
INLINE vec tanh(vec x) { return 1.0f - 2.0f * reciprocal(1.0f + Power(2 * LOG2E)(min(splat(40.0f), x))); }

// Rows to columns, in place: log W rounds that each swap the off-diagonal blocks of S × S.
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

// The sum of the lanes of each of W vectors: that of x[i] in lane i of x[0]. Each round halves their number.
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
