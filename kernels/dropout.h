// Elementwise dropout without stored masks: a hash of two seeds and the position decides which elements are dropped, in
// the forward and the backward pass. With keep(y) = 0 or y / (1 − dropout):
//
//   add:       out = x + keep(y); the backward pass is out = keep(y)
//   relu:      out = keep(max(y, 0))
//   relu_back: out = y / (1 − dropout) if x > 0, otherwise 0; x is the output of relu, so no hash is needed
#pragma once

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

template <Drop::Kind kind>
void drop_some(const Drop& d, int64_t from, int64_t to) {
  uvec place;
  for (int i = 0; i < W; ++i) place[i] = uint32_t(from + i);
  int64_t i = from;
  for (; i + W <= to; i += W, place += W)
    store(d.out + i, drop<kind>(d, place, d.x ? load(d.x + i) : vec{}, load(d.y + i)));
  if (i == to) return;
  float x[W] = {}, y[W] = {}, out[W];
  for (int64_t j = i; j < to; ++j) {
    x[j - i] = d.x ? d.x[j] : 0;
    y[j - i] = d.y[j];
  }
  store(out, drop<kind>(d, place, load(x), load(y)));
  for (int64_t j = i; j < to; ++j) d.out[j] = out[j - i];
}

inline void dropout(const Drop& d, int threads) {
  constexpr int64_t PIECE = 1 << 15;
  parallel((d.size + PIECE - 1) / PIECE, threads,
           [](void* context, int64_t piece) {
             const Drop& d = *static_cast<const Drop*>(context);
             const int64_t from = piece * PIECE, to = from + PIECE < d.size ? from + PIECE : d.size;
             if (d.kind == Drop::add) drop_some<Drop::add>(d, from, to);
             if (d.kind == Drop::relu) drop_some<Drop::relu>(d, from, to);
             if (d.kind == Drop::relu_back) drop_some<Drop::relu_back>(d, from, to);
           },
           const_cast<Drop*>(&d));
}

}  // namespace
}  // namespace regard
