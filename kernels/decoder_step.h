// One decoding step of a Transformer decoder: one token per row, with cached keys and values. It calls the kernels for
// linear layers and attention in sequence, so a step needs only one call from Python.
#pragma once

#include <cmath>

#include "linear.h"

namespace regard {
namespace {

// Layer norm of each row (Ba et al. 2016), with population variance. `out` may equal `x`.
INLINE void layer_norm(const Step::Norm& norm, float eps, const float* x, float* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    float mean = 0, square = 0;
    vec total{};
    int64_t i = 0;
    for (; i + W <= width; i += W) total += load(x + i);
    for (; i < width; ++i) mean += x[i];
    mean = (mean + sum(total)) / float(width);
    total = vec{};
    for (i = 0; i + W <= width; i += W) {
      const vec d = load(x + i) - mean;
      total += d * d;
    }
    for (; i < width; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1 / std::sqrt((square + sum(total)) / float(width) + eps);
    for (i = 0; i + W <= width; i += W)
      store(out + i, (load(x + i) - mean) * factor * load(norm.weight + i) + (norm.bias ? load(norm.bias + i) : vec{}));
    for (; i < width; ++i) out[i] = (x[i] - mean) * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
  }
}

INLINE void apply(const Step::Layer& layer, const float* x, float* out, int64_t rows, int64_t depth, int64_t columns,
                  int threads) {
  const Linear l = {x, layer.weight, layer.scales, layer.bias, out, rows, depth, columns};
  (layer.scales ? linear_int8 : linear)(l, threads);
}

INLINE View view(const float* data, const int64_t (&sizes)[5], const int64_t (&strides)[5]) {
  View v;
  v.data = reinterpret_cast<char*>(const_cast<float*>(data));
  v.type = Type::float32;
  for (int i = 0; i < 3; ++i) v.lead[i] = sizes[i] == 1 ? 0 : strides[i];
  v.row = sizes[3] == 1 ? 0 : strides[3];
  v.column = 1;
  return v;
}

// query, out: batch · queries rows of (groups · per_group · head). keys: batch entries of (capacity, row); in each
// row, the values follow the keys.
INLINE bool attend(const Step& s, const float* query, int64_t query_row, const float* keys, int64_t capacity,
                   float* out, int64_t batch, int64_t queries, int64_t length, const int64_t* stop, int threads) {
  const int64_t heads = s.groups * s.per_group, row = 2 * s.groups * s.head, width = heads * s.head;
  Problem p;
  p.axes = 3;
  p.lead[0] = batch;
  p.lead[1] = s.groups;
  p.lead[2] = s.per_group;
  p.queries = p.all_queries = queries;
  p.keys = length;
  p.width = p.value_width = s.head;
  p.scale = 1 / std::sqrt(float(s.head));
  const int64_t q[5] = {batch, s.groups, s.per_group, queries, s.head}, k[5] = {batch, s.groups, 1, length, s.head};
  p.query = view(query, q, {queries * query_row, s.per_group * s.head, s.head, query_row, 1});
  p.output = view(out, q, {queries * width, s.per_group * s.head, s.head, width, 1});
  p.key = view(keys, k, {capacity * row, s.head, 0, row, 1});
  p.value = view(keys + s.groups * s.head, k, {capacity * row, s.head, 0, row, 1});
  if (stop) {
    p.terms = 1;
    p.stop[0].data = reinterpret_cast<char*>(const_cast<int64_t*>(stop));
    p.stop[0].type = Type::int64;
    p.stop[0].lead[0] = batch == 1 ? 0 : 1;
  }
  return forward(p, batch * queries * length * width < MIN_PRODUCTS / 4 ? 1 : threads);
}

INLINE void add(float* x, const float* y, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(x + i, load(x + i) + load(y + i));
  for (; i < count; ++i) x[i] += y[i];
}

INLINE void relu(float* x, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(x + i, max(vec{}, load(x + i)));
  for (; i < count; ++i) x[i] = x[i] < 0 ? 0 : x[i];
}

// Rows of vectors with a residual connection.
struct Residual {
  float *x, *y, *normed;  // y: the output of the sublayer
  int64_t rows, width;
  bool norm_first;
  float eps;

  // Computes x += f(norm(x)) or, if not norm_first, x = norm(x + f(x)). Returns whether the result of f is finite.
  template <class F>
  INLINE bool add(const Step::Norm& norm, F f) const {
    if (norm_first) layer_norm(norm, eps, x, normed, rows, width);
    if (!f(norm_first ? normed : x)) return false;
    regard::add(x, y, rows * width);
    if (!norm_first) layer_norm(norm, eps, x, x, rows, width);
    return true;
  }
};

bool step(const Step& s, int threads) {
  const int64_t heads = s.groups * s.per_group * s.head, row = 2 * s.groups * s.head;
  const Residual residual{s.x, s.y, s.normed, s.rows, s.width, s.norm_first, s.eps};
  for (int64_t i = 0; i < s.layers; ++i) {
    const Step::Block& b = s.blocks[i];
    bool finite = residual.add(b.norms[0], [&](const float* x) {
      apply(b.in_proj, x, s.projected, s.rows, s.width, heads + row, threads);
      for (int64_t r = 0; r < s.rows; ++r)
        memcpy(b.cache + (r * s.capacity + s.length) * row, s.projected + r * (heads + row) + heads,
               size_t(row) * sizeof(float));
      if (!attend(s, s.projected, heads + row, b.cache, s.capacity, s.attended, s.rows, 1, s.length + 1, nullptr,
                  threads))
        return false;
      apply(b.out_proj, s.attended, s.y, s.rows, heads, s.width, threads);
      return true;
    });
    finite = finite && residual.add(b.norms[1], [&](const float* x) {
      float* queries = s.index ? s.spread : s.projected;
      apply(b.query, x, s.projected, s.rows, s.width, heads, threads);
      const int64_t count = s.sources * s.slots;
      if (s.index) {
        memset(queries, 0, size_t(count * heads) * sizeof(float));
        for (int64_t r = 0; r < s.rows; ++r)
          memcpy(queries + s.index[r] * heads, s.projected + r * heads, size_t(heads) * sizeof(float));
      }
      float* out = s.index ? s.spread + count * heads : s.attended;
      if (!attend(s, queries, heads, b.source, s.keys, out, s.sources, s.slots, s.keys, s.lengths, threads))
        return false;
      if (b.queries)
        for (int64_t r = 0; r < s.rows; ++r)
          memcpy(b.queries + (r * s.capacity + s.length) * heads, s.projected + r * heads,
                 size_t(heads) * sizeof(float));
      if (s.index)
        for (int64_t r = 0; r < s.rows; ++r)
          memcpy(s.attended + r * heads, out + s.index[r] * heads, size_t(heads) * sizeof(float));
      apply(b.cross_out, s.attended, s.y, s.rows, heads, s.width, threads);
      return true;
    });
    if (!finite) return false;
    residual.add(b.norms[2], [&](const float* x) {
      apply(b.ffn_in, x, s.hidden, s.rows, s.width, s.inner, threads);
      relu(s.hidden, s.rows * s.inner);
      apply(b.ffn_out, s.hidden, s.y, s.rows, s.inner, s.width, threads);
      return true;
    });
  }
  if (s.norm.weight) layer_norm(s.norm, s.eps, s.x, s.x, s.rows, s.width);
  apply(s.output, s.x, s.logits, s.rows, s.width, s.vocabulary, threads);
  return true;
}

}  // namespace
}  // namespace regard
