// The matrix product used by all kernels:  C[r][v] (+)= Σ_t A(r, t) · B[t][v].
//
// An element of A or B is a float or, if `Element` is Pair, a pair of bfloat16 numbers. The product of two pairs is the
// sum of their elementwise products.
//
// Columns of B and C are vector lanes. Elements of A are broadcast. They are read along rows (Walk::along,
// A(r, t) = a[r·step + t]) or down columns (Walk::down, A(r, t) = a[t·step + r]), so neither A nor its transpose needs
// packing. A tile of C stays in registers for all t.
#pragma once

#include "vector.h"

namespace regard {
namespace {

enum class Walk { along, down };

// Memory that is needed soon, prefetched one cache line at a time: one line per step of a product's inner loop. A burst
// of prefetches would stall the processor.
class Ahead {
 public:
  // Adds `count` rows of `bytes` bytes, `stride` bytes apart. `writes`: whether they will be written.
  void add(const char* at, int64_t count, int64_t bytes, int64_t stride, bool writes) {
    if (stride == bytes) bytes *= count, count = 1;
    if (count < 1 || bytes < 1 || size_ == MAX) return;
    ranges_[size_++] = {at, count, bytes, stride, writes};
    if (size_ == 1) begin();
  }

  bool done() const { return now_ == size_; }

  INLINE void step() {
    if (writes_)
      __builtin_prefetch(at_, 1, 2);
    else
      __builtin_prefetch(at_, 0, 2);
    at_ += by_;
    if (at_ >= end_) next();
  }

  void finish() {
    while (!done()) step();
  }

 private:
  static constexpr int MAX = 8;
  struct Range {
    const char* at;
    int64_t count, bytes, stride;
    bool writes;
  };

  void begin() {
    at_ = ranges_[now_].at;
    end_ = at_ + ranges_[now_].bytes;
    writes_ = ranges_[now_].writes;
  }

  __attribute__((noinline)) void next() {
    Range& range = ranges_[now_];
    range.at += range.stride;
    if (--range.count || ++now_ < size_) return begin();
    at_ = end_ - 1;  // nothing is left: repeat the last line until the product ends
    by_ = 0;
  }

  Range ranges_[MAX];
  int size_ = 0, now_ = 0;
  int64_t by_ = 64;
  const char *at_ = nullptr, *end_ = nullptr;
  bool writes_ = false;
};

struct Float {
  using lanes = vec;
  INLINE static vec broadcast(const float* x) { return splat(*x); }
  INLINE static vec add(vec sum, vec y, vec x) { return sum + y * x; }
  INLINE static vec scale(vec sum, float) { return sum; }
};

struct Pair {
  using lanes = uvec;
  INLINE static uvec broadcast(const float* x) {
    uint32_t word;  // not a float: copying could change the bits of a NaN
    memcpy(&word, x, 4);
    return uvec{} + word;
  }
  INLINE static vec add(vec sum, uvec y, uvec x) { return add_pairs(sum, y, x); }
  INLINE static vec scale(vec sum, float factor) { return sum * factor; }
};

template <int R, int V, Walk walk, bool prefetches = false, class Element = Float>
INLINE void tile(const float* a, ptrdiff_t step, const float* b, ptrdiff_t b_step, float* c, ptrdiff_t c_step,
                 int depth, bool add, Ahead* ahead = nullptr, float factor = 1) {
  vec sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = vec{};
#pragma GCC unroll 2
  for (int t = 0; t < depth; ++t) {
    typename Element::lanes x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if (R <= 4 && R < tall(V))
        __builtin_prefetch(b + v * W + 16 * b_step);  // tiles with few rows are bound by memory latency
      x[v] = (typename Element::lanes)load(b + v * W);
    }
    if constexpr (prefetches) ahead->step();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto y = Element::broadcast(walk == Walk::along ? a + r * step : a + r);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = Element::add(sums[r][v], y, x[v]);
    }
    a += walk == Walk::along ? 1 : step;
    b += b_step;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* at = c + r * c_step + v * W;
      const vec sum = Element::scale(sums[r][v], factor);
      store(at, add ? load(at) + sum : sum);
    }
}

struct Product {
  const float* a;
  ptrdiff_t a_step;
  const float* b;
  ptrdiff_t b_step;
  float* c;
  ptrdiff_t c_step;
  Ahead* ahead = nullptr;
  float factor = 1;  // multiplies the result of a product of pairs
};

template <int R, int V, Walk walk, class Element>
INLINE void rows_of(Product& p, int& rows, int depth, bool add) {
  for (; rows >= R; rows -= R) {
    if (V == 1 && walk == Walk::along)  // little work per row of A: prefetch the next rows
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < depth; t += 16) __builtin_prefetch(p.a + (2 * R + r) * p.a_step + t);
    if (R == tall(V) && p.ahead && !p.ahead->done())
      tile<R, V, walk, R == tall(V), Element>(p.a, p.a_step, p.b, p.b_step, p.c, p.c_step, depth, add, p.ahead,
                                              p.factor);
    else
      tile<R, V, walk, false, Element>(p.a, p.a_step, p.b, p.b_step, p.c, p.c_step, depth, add, nullptr, p.factor);
    p.a += walk == Walk::along ? R * p.a_step : R;
    p.c += R * p.c_step;
  }
}

template <int V, Walk walk, class Element>
__attribute__((noinline)) void columns_of(Product p, int rows, int depth, bool add) {
  rows_of<tall(V), V, walk, Element>(p, rows, depth, add);
  if constexpr (tall(V) > 8) rows_of<8, V, walk, Element>(p, rows, depth, add);
  if constexpr (tall(V) > 4) rows_of<4, V, walk, Element>(p, rows, depth, add);
  rows_of<2, V, walk, Element>(p, rows, depth, add);
  rows_of<1, V, walk, Element>(p, rows, depth, add);
}

// C (+)= A · B with `vectors` vectors of columns.
template <Walk walk, class Element = Float>
void multiply(Product p, int rows, int vectors, int depth, bool add) {
  if (rows < 4 && vectors == 2 * MAX_VECTORS)  // few rows: read B once, in whole rows
    return rows_of<1, 2 * MAX_VECTORS, walk, Element>(p, rows, depth, add);
  while (vectors > 0) {
    // split evenly: 5 vectors become 3 + 2, not 4 + 1
    const int parts = (vectors + MAX_VECTORS - 1) / MAX_VECTORS, now = (vectors + parts - 1) / parts;
    switch (now) {
      case 1: columns_of<1, walk, Element>(p, rows, depth, add); break;
      case 2: columns_of<2, walk, Element>(p, rows, depth, add); break;
      case 3: columns_of<3, walk, Element>(p, rows, depth, add); break;
      default:
        if constexpr (MAX_VECTORS > 3) columns_of<4, walk, Element>(p, rows, depth, add);
    }
    p.b += now * W;
    p.c += now * W;
    vectors -= now;
  }
}

}  // namespace
}  // namespace regard
