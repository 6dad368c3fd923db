// Few rows that attend to many keys, as in decoding. Keys and values are read in place, as float32, bfloat16, or int8
// with scales:
//
//   score_j = key_scale_j · Σ_t query[t] · key_j[t]        output = Σ_j (weight_j · value_scale_j) · value_j
//
// Memory bandwidth is the bottleneck, so each row is read once, as a whole, in address order. int8 values become floats
// in registers, and all sums are float32. A key's scale multiplies its score, and a value's scale its weight, so no
// dequantized value is stored. Scores are rounded as in `Block::match_few`, because the kernels in inspect.h recompute
// them for this τ.
#pragma once

#include <type_traits>

#include "block.h"

namespace regard {
namespace {

constexpr int64_t DISTANCE = 4096;  // bytes to prefetch ahead

INLINE vec read(const float* from) { return load(from); }
INLINE vec read(const int8_t* from) { return widen_int8(from); }
INLINE vec read(const uint16_t* from) {  // bfloat16
  typedef uint16_t halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
  return (vec)(__builtin_convertvector(*reinterpret_cast<const halves*>(from), uvec) << 16);
}

// Whether keys and values can be read in place, in whole vectors.
INLINE bool in_place(const Problem& p) {
  const bool stored = p.key.type == Type::float32 || p.key.type == Type::bfloat16 || p.key.type == Type::int8;
  return stored && p.value.type == p.key.type && p.key.column == 1 && p.value.column == 1 && p.width % W == 0 &&
         p.value_width % W == 0;
}

// Prefetches a row that is read later, for R query rows. float32 keys of a single query are not prefetched, because the
// processor prefetches them itself: on Zen 3, they reach 83 % of the bandwidth of a plain read without prefetching and
// 73 % with it. For int8, prefetching adds 20 % on Zen 3; on Zen 5, it adds 14 % for bfloat16, and 30 to 40 % for
// float32 and bfloat16 with four rows of width 128, which compute too much between two reads.
template <int R, class Number>
INLINE void prefetch_row(const Number* row, int64_t step, int64_t width) {
  if constexpr (R == 1 && sizeof(Number) > 2) return;
  const int64_t bytes = width * int64_t(sizeof(Number)), rows = DISTANCE / (bytes ? bytes : 1) + 1;
  const auto* at = reinterpret_cast<const char*>(row + rows * step);
  for (int64_t t = 0; t < bytes; t += 64) __builtin_prefetch(at + t);
}

// Calls `work` with the number of rows, at most R, as a compile-time constant.
template <int R, class Work>
INLINE void with_rows(int rows, Work work) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, work);
  }
  work(std::integral_constant<int, R>{});
}

// Multiplies scores or weights [lane][MANY] by one scale per token. Not inlined: its buffer in the caller's stack frame
// makes float32 calls, which do not use it, 2 % slower.
__attribute__((noinline)) inline void scale_rows(const Block& b, const View& scale, int64_t from, int n, float* rows) {
  const float* factors = reinterpret_cast<const float*>(scale.data) + b.p.offset_of(scale, b.unit) + from * scale.row;
  const int whole = scale.row == 1 ? n / W * W : 0;  // number of scales that are read in place
  alignas(64) float copy[MANY];
  for (int j = whole; j < n; ++j) copy[j] = factors[j * scale.row];
  for (int j = n; j < padded(n); ++j) copy[j] = 0;
  for (int i = 0; i < b.count; ++i) {
    float* row = rows + i * MANY;
    for (int j = 0; j < whole; j += W) store(row + j, load(row + j) * load(factors + j));
    for (int j = whole; j < n; j += W) store(row + j, load(row + j) * load(copy + j));
  }
}

// query · key for R rows and n keys, written to rows [lane][MANY]. T: number of vectors per key, or 0 for any number.
template <class Number, int R, int T>
INLINE void match_as(const Block& b, int64_t from, int n, float* rows) {
  const Problem& p = b.p;
  const int64_t width = T ? T * W : p.width;
  const auto* keys = reinterpret_cast<const Number*>(p.key.data) + b.key_at + from * p.key.row;
  for (int j = 0; j < n; j += W) {
    vec sums[R][W];
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) {
      const Number* key = keys + (j + k < n ? j + k : n - 1) * p.key.row;
      prefetch_row<R>(key, p.key.row, width);
      vec total[R] = {};
#pragma GCC unroll 16
      for (int64_t t = 0; t < width; t += W) {
        const vec x = read(key + t);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) total[i] += load(b.rows + i * width + t) * x;
      }
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) sums[i][k] = total[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      sum_each(sums[i]);
      store(rows + i * MANY + j, sums[i][0]);
    }
  }
}

template <class Number, int R>
INLINE void match_rows(const Block& b, int64_t from, int n, float* rows) {
  switch (b.p.width / W) {
    case 4: return match_as<Number, R, 4>(b, from, n, rows);
    case 8: return match_as<Number, R, 8>(b, from, n, rows);
    case 16: return match_as<Number, R, 16>(b, from, n, rows);
    default: return match_as<Number, R, 0>(b, from, n, rows);
  }
}

// Calls `work` with a null pointer to the type of the keys and values.
template <class Work>
INLINE void with_type(const Problem& p, Work work) {
  switch (p.key.type) {
    case Type::int8: return work(static_cast<const int8_t*>(nullptr));
    case Type::bfloat16: return work(static_cast<const uint16_t*>(nullptr));
    default: return work(static_cast<const float*>(nullptr));
  }
}

// query · key for n keys, not multiplied by the scales of int8 keys, written to rows [lane][MANY].
template <class Number>
void match_in_place(const Block& b, int64_t from, int n, float* rows, const Number*) {
  with_rows<MAX_FEW>(b.count, [&](auto rows_of) { match_rows<Number, rows_of.value>(b, from, n, rows); });
}

// Σ_j weight_j · value_j for R rows and V vectors of features, starting at feature `first`.
template <class Number, int R, int V>
INLINE void add_columns(const Block& b, const float* weights, int64_t from, int n, int64_t first, float* sums,
                        bool add) {
  const View& view = b.p.value;
  const auto* value = reinterpret_cast<const Number*>(view.data) + b.value_at + from * view.row + first;
  vec total[R][V] = {};
  for (int j = 0; j < n; ++j, value += view.row) {
    prefetch_row<R>(value, view.row, V * W);
    vec weight[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) weight[i] = splat(weights[i * MANY + j]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const vec x = read(value + v * W);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) total[i][v] += weight[i] * x;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      float* at = sums + i * b.p.value_width + first + v * W;
      store(at, add ? load(at) + total[i][v] : total[i][v]);
    }
}

template <class Number, int R>
INLINE void add_rows_of(const Block& b, const float* weights, int64_t from, int n, float* sums, bool add) {
  // number of vectors per row whose sums fit into registers
  constexpr int MAX_SUMS = R == 1 ? 8 : R <= tall(MAX_VECTORS) ? MAX_VECTORS : MAX_VECTORS - 1;
  const int64_t width = b.p.value_width;
  int64_t first = 0;
  for (; width - first >= MAX_SUMS * W; first += MAX_SUMS * W)
    add_columns<Number, R, MAX_SUMS>(b, weights, from, n, first, sums, add);
  if constexpr (MAX_SUMS > 4)
    for (; width - first >= 4 * W; first += 4 * W) add_columns<Number, R, 4>(b, weights, from, n, first, sums, add);
  for (; width - first >= 2 * W; first += 2 * W) add_columns<Number, R, 2>(b, weights, from, n, first, sums, add);
  for (; first < width; first += W) add_columns<Number, R, 1>(b, weights, from, n, first, sums, add);
}

// sums (+)= Σ_j weight_j · value_j. Weights, [lane][MANY], include the scales of int8 values.
// sums: [lane][value width].
template <class Number>
void add_in_place(const Block& b, const float* weights, int64_t from, int n, float* sums, bool add, const Number*) {
  with_rows<MAX_FEW>(b.count,
                     [&](auto rows_of) { add_rows_of<Number, rows_of.value>(b, weights, from, n, sums, add); });
}

}  // namespace
}  // namespace regard
