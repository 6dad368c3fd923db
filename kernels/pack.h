// Packing: converts tensors of any stride and type to rows of float32, zero-padded to whole vectors, and rows to
// columns, with one query per lane. int8 values are not multiplied by their scales here: see few_queries.h.
#pragma once

#include "abi.h"
#include "vector.h"

namespace regard {
namespace {

INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

INLINE float widen(uint16_t bits) {  // from bfloat16
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}

INLINE float widen_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  uint32_t wide = (rest << 13) + 0x38000000;
  if (rest >= 0x7c00) wide += 0x38000000;  // infinity and NaN
  float x;
  if (rest < 0x0400) {  // subnormal: rest · 2^−24
    x = float(rest) * 5.9604645e-8f;
    memcpy(&wide, &x, 4);
  }
  wide |= sign;
  memcpy(&x, &wide, 4);
  return x;
}

// Returns one element of a tensor as a float.
INLINE float number(const View& view, int64_t at) {
  switch (view.type) {
    case Type::float32: return reinterpret_cast<const float*>(view.data)[at];
    case Type::bfloat16: return widen(reinterpret_cast<const uint16_t*>(view.data)[at]);
    case Type::float16: return widen_half(reinterpret_cast<const uint16_t*>(view.data)[at]);
    case Type::boolean: return reinterpret_cast<const uint8_t*>(view.data)[at] ? 1.0f : 0.0f;
    case Type::int8: return float(reinterpret_cast<const int8_t*>(view.data)[at]);
    default: return 0;
  }
}

INLINE int64_t integer(const View& view, int64_t at) { return reinterpret_cast<const int64_t*>(view.data)[at]; }

template <class From, class Convert>
INLINE void copy_row(float* to, const From* from, int64_t step, int64_t count, Convert convert) {
  if (step == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i * step]);
}

// Copies `count` elements, starting at `at`, as floats, and pads them with zeros up to `size`.
INLINE void stage_row(float* to, const View& view, int64_t at, int64_t count, int64_t size) {
  switch (view.type) {
    case Type::float32:
      copy_row(to, reinterpret_cast<const float*>(view.data) + at, view.column, count, [](float x) { return x; });
      break;
    case Type::bfloat16:
      copy_row(to, reinterpret_cast<const uint16_t*>(view.data) + at, view.column, count,
               [](uint16_t x) { return widen(x); });
      break;
    case Type::float16:
      if (view.column == 1) {
        const auto* from = reinterpret_cast<const uint16_t*>(view.data) + at;
        int64_t i = widen_halves(to, from, count);
        for (; i < count; ++i) to[i] = widen_half(from[i]);
        break;
      }
      copy_row(to, reinterpret_cast<const uint16_t*>(view.data) + at, view.column, count,
               [](uint16_t x) { return widen_half(x); });
      break;
    case Type::boolean:
      copy_row(to, reinterpret_cast<const uint8_t*>(view.data) + at, view.column, count,
               [](uint8_t x) { return x ? 1.0f : 0.0f; });
      break;
    case Type::int8:
      copy_row(to, reinterpret_cast<const int8_t*>(view.data) + at, view.column, count,
               [](int8_t x) { return float(x); });
      break;
    default: break;
  }
  for (int64_t i = count; i < size; ++i) to[i] = 0;
}

// Rows in a form that the matrix product can read: address and stride.
struct Rows {
  const float* at;
  ptrdiff_t step;
};

INLINE int64_t bytes_of(Type type) {
  return type == Type::int64 ? 8 : type == Type::float32 ? 4 : type == Type::boolean || type == Type::int8 ? 1 : 2;
}

// Whether rows can be read in place; if `whole` is set, in whole vectors.
INLINE bool stays(const View& view, int64_t width, bool whole) {
  return view.type == Type::float32 && view.column == 1 && !(whole && width % W);
}

// Returns `count` rows, starting at `first`, in place if possible, otherwise copied to `buffer`.
INLINE Rows stage(const View& view, int64_t offset, int64_t first, int64_t count, int64_t width, bool whole,
                  float* buffer) {
  offset += first * view.row;
  if (stays(view, width, whole)) return {reinterpret_cast<const float*>(view.data) + offset, ptrdiff_t(view.row)};
  for (int64_t i = 0; i < count; ++i)
    stage_row(buffer + i * padded(width), view, offset + i * view.row, width, padded(width));
  return {buffer, ptrdiff_t(padded(width))};
}

// Whether rows can be read in place as pairs of bfloat16.
INLINE bool are_pairs(const Problem& p, const View& view, int64_t width) {
  bool even = view.type == Type::bfloat16 && view.column == 1 && width % 2 == 0 && view.row % 2 == 0 &&
              reinterpret_cast<uintptr_t>(view.data) % 4 == 0;
  for (int i = 0; i < p.axes; ++i) even &= view.lead[i] % 2 == 0;
  return even;
}

// Converts values to the tensor's type and stores them.
INLINE void store_as(const View& view, int64_t at, vec x, int count) {
  alignas(64) uint16_t halves[W];
  if (view.type == Type::float16) {
    narrow_halves(halves, x);
  } else {
    typedef uint16_t narrow __attribute__((vector_size(2 * W)));
    const narrow bits = __builtin_convertvector(round_to_bfloat16(x) >> 16, narrow);
    memcpy(halves, &bits, sizeof bits);
  }
  memcpy(reinterpret_cast<uint16_t*>(view.data) + at, halves, size_t(count) * 2);
}

// columns[t][lane] = rows[lane][t] · factor, for `lanes` lanes, the first `count` of which have a row. If not `scaled`,
// the elements are copied bit by bit.
template <bool scaled = true, class Row>
INLINE void to_columns(float* columns, int lanes, int count, int64_t width, float factor, Row row) {
  for (int first = 0; first < lanes; first += W)
    for (int64_t t = 0; t < width; t += W) {
      vec block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        block[i] = first + i < count ? load(row(first + i) + t) : vec{};
        if constexpr (scaled) block[i] *= factor;
      }
      transpose(block);
      const int valid = width - t < W ? int(width - t) : W;
      if (valid == W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(columns + (t + i) * lanes + first, block[i]);
      } else {
        for (int i = 0; i < valid; ++i) store(columns + (t + i) * lanes + first, block[i]);
      }
    }
}

// The inverse of to_columns: rows[lane][t] from columns[t][lane]. Calls put(lane, t, vector, number of valid elements).
template <class Put>
INLINE void to_rows(const float* columns, int lanes, int count, int64_t width, Put put) {
  for (int first = 0; first < count; first += W)
    for (int64_t t = 0; t < width; t += W) {
      const int valid = width - t < W ? int(width - t) : W;
      vec block[W];
      for (int i = 0; i < W; ++i) block[i] = i < valid ? load(columns + (t + i) * lanes + first) : vec{};
      transpose(block);
      for (int i = 0; i < W && first + i < count; ++i) put(first + i, t, block[i], valid);
    }
}

INLINE void store_some(float* to, vec x, int count) {
  if (count == W) {
    store(to, x);
  } else {
    float lanes[W];
    store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
  }
}

}  // namespace
}  // namespace regard
