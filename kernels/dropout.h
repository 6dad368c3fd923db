// Elementwise dropout without stored masks: a hash of two seeds and the position decides which elements are dropped, in
// the forward and the backward pass. With keep(y) = 0 or y / (1 − dropout):
//
//   add:       out = x + keep(y); the backward pass is out = keep(y)
//   relu:      out = keep(max(y, 0))
//   relu_back: out = y / (1 − dropout) if x > 0, otherwise 0; x is the output of relu, so no hash is needed
//
// x, y and out are float32 or bfloat16; sums are float32.
#pragma once

#include "pack.h"
#include "vector.h"

namespace regard {
namespace {

// The hash function in reference.py, for a scalar or a vector.
template <class Number>
INLINE Number mix(Number x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

template <Drop::Kind kind>
INLINE vec drop(const Drop& d, uvec place, vec x, vec y) {
  const vec kept = y * d.kept;
  if constexpr (kind == Drop::relu_back) return x <= 0 ? vec{} : kept;  // NaN stays NaN
  const uvec hashed = mix(mix(place ^ d.seed) ^ d.other);
  const vec y_kept = hashed >= d.threshold ? kept : vec{};
  return kind == Drop::relu ? (y_kept < 0 ? vec{} : y_kept) : x + y_kept;
}

// Processes n elements, which start at position `from`. x may be null.
template <Drop::Kind kind>
void drop_some(const Drop& d, int64_t from, int64_t n, const float* x, const float* y, float* out) {
  uvec place;
  for (int i = 0; i < W; ++i) place[i] = uint32_t(from + i);
  int64_t i = 0;
  for (; i + W <= n; i += W, place += W) store(out + i, drop<kind>(d, place, x ? load(x + i) : vec{}, load(y + i)));
  if (i == n) return;
  float last_x[W] = {}, last_y[W] = {}, last[W];
  for (int64_t j = i; j < n; ++j) {
    last_x[j - i] = x ? x[j] : 0;
    last_y[j - i] = y[j];
  }
  store(last, drop<kind>(d, place, load(last_x), load(last_y)));
  for (int64_t j = i; j < n; ++j) out[j] = last[j - i];
}

// Returns elements as float32, in place or converted to `buffer`; null if there are none.
INLINE const float* as_floats(const Drop::Numbers& numbers, int64_t from, int64_t n, float* buffer) {
  if (!numbers.at || !numbers.half) return numbers.at ? reinterpret_cast<const float*>(numbers.at) + from : nullptr;
  const auto* halves = reinterpret_cast<const uint16_t*>(numbers.at) + from;
  for (int64_t i = 0; i < n; ++i) buffer[i] = widen(halves[i]);
  return buffer;
}

// Converts to bfloat16; NaN stays NaN.
INLINE void to_bfloat16(uint16_t* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    to[i] = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

template <Drop::Kind kind>
void drop_piece(const Drop& d, int64_t from, int64_t to) {
  constexpr int64_t CHUNK = 1024;  // elements whose conversions stay in the L1 cache
  alignas(64) float x[CHUNK], y[CHUNK], out[CHUNK];
  for (int64_t n; from < to; from += n) {
    n = to - from < CHUNK ? to - from : CHUNK;
    float* target = d.out.half ? out : reinterpret_cast<float*>(d.out.at) + from;
    drop_some<kind>(d, from, n, as_floats(d.x, from, n, x), as_floats(d.y, from, n, y), target);
    if (d.out.half) to_bfloat16(reinterpret_cast<uint16_t*>(d.out.at) + from, out, n);
  }
}

inline void dropout(const Drop& d, int threads) {
  constexpr int64_t PIECE = 1 << 15;
  parallel((d.size + PIECE - 1) / PIECE, threads,
           [](void* context, int64_t piece) {
             const Drop& d = *static_cast<const Drop*>(context);
             const int64_t from = piece * PIECE, to = from + PIECE < d.size ? from + PIECE : d.size;
             if (d.kind == Drop::add) drop_piece<Drop::add>(d, from, to);
             if (d.kind == Drop::relu) drop_piece<Drop::relu>(d, from, to);
             if (d.kind == Drop::relu_back) drop_piece<Drop::relu_back>(d, from, to);
           },
           const_cast<Drop*>(&d));
}

}  // namespace
}  // namespace regard
