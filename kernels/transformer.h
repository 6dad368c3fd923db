// A Transformer for inference: encodes whole sentences, and extends hypotheses by one token. The blocks have layer
// norms and ReLU; see decoder_step.h for their parts.
#pragma once

#include "decoder_step.h"

namespace regard {
namespace {

// Scratch memory for all rows: see `Stack::scratch`.
struct Buffers {
  float *normed, *y, *projected, *attended, *hidden;

  Buffers(const Stack& s, int64_t rows, float* memory) {
    normed = memory;
    y = normed + rows * s.width;
    projected = y + rows * s.width;
    attended = projected + rows * (s.queries() + s.key_values());
    hidden = attended + rows * s.queries();
  }
};

template <class F>
INLINE void for_each(int64_t items, int threads, F work) {
  parallel(items, threads, [](void* context, int64_t item) { (*static_cast<F*>(context))(item); }, &work);
}

// 0, 1, 2, …: one number per lane.
INLINE vec lane_numbers() {
  static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static_assert(W <= 16, "more lanes than numbers");
  return load(numbers);
}

// The dot products of a query with W keys, one per lane. A key starts `offset` floats after its address in `keys`.
INLINE vec scores_of(const float* query, int64_t width, const float* const* keys, int64_t offset) {
  vec sums[W] = {};
  int64_t j = 0;
  for (; j + W <= width; j += W) {
    const vec q = load(query + j);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] += q * load(keys[i] + offset + j);
  }
  sum_each(sums);
  for (; j < width; ++j)
    for (int i = 0; i < W; ++i) sums[0][i] += query[j] * keys[i][offset + j];
  return sums[0];
}

// Attention of one row: for each head, softmax(query · keyᵀ / √d) · value over n keys. keys: for each token, the
// address of the keys of all heads, followed by the values; padded to whole vectors with valid addresses. weights:
// receives the weights, `step` floats per head, at least padded(n); if step is 0, all heads use the same memory.
INLINE void attend_row(const Stack& s, const float* query, float* out, int64_t n, const float* const* keys,
                       float* weights, int64_t step) {
  const float scale = 1 / std::sqrt(float(s.head));
  for (int64_t h = 0; h < s.groups * s.per_group; ++h, query += s.head, out += s.head, weights += step) {
    const int64_t offset = h / s.per_group * s.head, values = s.groups * s.head + offset;
    vec top = splat(-INF);
    for (int64_t first = 0; first < n; first += W) {
      vec x = scores_of(query, s.head, keys + first, offset) * scale;
      if (n - first < W) x = lane_numbers() < float(n - first) ? x : splat(-INF);
      top = max(x, top);
      store(weights + first, x);
    }
    float largest = -INF;
    for (int i = 0; i < W; ++i) largest = top[i] > largest ? top[i] : largest;
    vec total{};
    for (int64_t first = 0; first < n; first += W) {
      const vec x = exp(load(weights + first) - largest);
      total += x;
      store(weights + first, x);
    }
    const float factor = 1 / sum(total);
    for (int64_t first = 0; first < n; first += W) store(weights + first, load(weights + first) * factor);
    int64_t j = 0;
    for (; j + 2 * W <= s.head; j += 2 * W) {
      vec sums[2] = {};
      for (int64_t i = 0; i < n; ++i) {
        const float* value = keys[i] + values + j;
        sums[0] += weights[i] * load(value);
        sums[1] += weights[i] * load(value + W);
      }
      store(out + j, sums[0]);
      store(out + j + W, sums[1]);
    }
    for (; j + W <= s.head; j += W) {
      vec sum{};
      for (int64_t i = 0; i < n; ++i) sum += weights[i] * load(keys[i] + values + j);
      store(out + j, sum);
    }
    for (; j < s.head; ++j) {
      out[j] = 0;
      for (int64_t i = 0; i < n; ++i) out[j] += weights[i] * keys[i][values + j];
    }
  }
}

// The addresses of n keys, padded to whole vectors with the first address. key(i): the address of key i.
template <class Key>
INLINE const float** addresses_of(int64_t n, Key key) {
  const float** keys = arena.take<const float*>(padded(n));
  for (int64_t i = 0; i < n; ++i) keys[i] = key(i);
  for (int64_t i = n; i < padded(n); ++i) keys[i] = keys[0];
  return keys;
}

INLINE bool feed_forward(const Stack& s, const Stack::Block& b, const Buffers& at, const float* x, int64_t rows,
                         int threads) {
  apply(b.ffn_in, x, at.hidden, rows, s.width, s.inner, threads);
  relu(at.hidden, rows * s.inner);
  apply(b.ffn_out, at.hidden, at.y, rows, s.inner, s.width, threads);
  return true;
}

// Applies the encoder to packed sentences. Returns whether the result is finite.
bool encode(const Encode& e, int threads) {
  const Stack& s = *e.stack;
  const int64_t rows = e.starts[e.sentences], queries = s.queries(), key_values = s.key_values();
  const int64_t row = queries + key_values;
  const Buffers at(s, rows, e.scratch);
  const Residual residual{e.x, at.y, at.normed, rows, s.width, s.norm_first, s.eps};
  const int attention_threads =
      rows * rows / (e.sentences ? e.sentences : 1) * queries < MIN_PRODUCTS / 4 ? 1 : threads;
  bool finite = true;  // the attention's output may be finite although a score is not
  if (s.first.weight) layer_norm(s.first, s.eps, e.x, e.x, rows, s.width);
  for (int64_t i = 0; i < s.layers; ++i) {
    const Stack::Block& b = s.blocks[i];
    residual.add(b.norms[0], [&](const float* x) {
      apply(b.in_proj, x, at.projected, rows, s.width, row, threads);
      for_each(e.sentences, attention_threads, [&](int64_t sentence) {
        const int64_t first = e.starts[sentence], n = e.starts[sentence + 1] - first;
        Problem p;
        p.axes = 3;
        p.lead[0] = 1;
        p.lead[1] = s.groups;
        p.lead[2] = s.per_group;
        p.queries = p.all_queries = p.keys = n;
        p.width = p.value_width = s.head;
        p.scale = 1 / std::sqrt(float(s.head));
        const int64_t q[5] = {1, s.groups, s.per_group, n, s.head}, k[5] = {1, s.groups, 1, n, s.head};
        const float* from = at.projected + first * row;
        p.query = view(from, q, {0, s.per_group * s.head, s.head, row, 1});
        p.key = view(from + queries, k, {0, s.head, 0, row, 1});
        p.value = view(from + queries + s.groups * s.head, k, {0, s.head, 0, row, 1});
        p.output = view(at.attended + first * queries, q, {0, s.per_group * s.head, s.head, queries, 1});
        if (n && !forward(p, e.sentences == 1 ? attention_threads : 1))
          __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      });
      apply(b.out_proj, at.attended, at.y, rows, queries, s.width, threads);
      return true;
    });
    residual.add(b.norms[2], [&](const float* x) { return feed_forward(s, b, at, x, rows, threads); });
  }
  if (s.last.weight) layer_norm(s.last, s.eps, e.x, e.x, rows, s.width);
  return finite && all_finite(e.x, rows * s.width);
}

// Applies the decoder to one token per hypothesis. Returns whether the result is finite.
bool extend(const Extend& e, int threads) {
  const Stack& s = *e.stack;
  const int64_t queries = s.queries(), key_values = s.key_values(), row = queries + key_values;
  const Buffers at(s, e.rows, e.scratch);
  const Residual residual{e.x, at.y, at.normed, e.rows, s.width, s.norm_first, s.eps};
  const auto threads_for = [&](int64_t keys) { return e.rows * keys * queries < MIN_PRODUCTS / 4 ? 1 : threads; };
  if (s.first.weight) layer_norm(s.first, s.eps, e.x, e.x, e.rows, s.width);
  for (int64_t i = 0; i < s.layers; ++i) {
    const Stack::Block& b = s.blocks[i];
    residual.add(b.norms[0], [&](const float* x) {
      apply(b.in_proj, x, at.projected, e.rows, s.width, row, threads);
      float* newest = e.caches[e.length] + i * e.rows * key_values;
      for (int64_t r = 0; r < e.rows; ++r)
        memcpy(newest + r * key_values, at.projected + r * row + queries, size_t(key_values) * sizeof(float));
      for_each(e.rows, threads_for(e.length + 1), [&](int64_t r) {
        const BlockScratch scratch;
        const int32_t* cached = e.cached + r * e.stride;
        const float** keys = addresses_of(e.length + 1, [&](int64_t t) {
          return e.caches[t] + (i * e.counts[t] + (t == e.length ? r : cached[t])) * key_values;
        });
        attend_row(s, at.projected + r * row, at.attended + r * queries, e.length + 1, keys,
                   arena.take(padded(e.length + 1)), 0);
      });
      apply(b.out_proj, at.attended, at.y, e.rows, queries, s.width, threads);
      return true;
    });
    residual.add(b.norms[1], [&](const float* x) {
      apply(b.query, x, at.projected, e.rows, s.width, queries, threads);
      for_each(e.rows, threads_for(e.max_source), [&](int64_t r) {
        const BlockScratch scratch;
        const int64_t first = e.starts[e.sentences[r]], n = e.starts[e.sentences[r] + 1] - first;
        const float* source = e.sources[i] + first * key_values;
        const int64_t heads = s.groups * s.per_group, step = i == e.recorded ? padded(e.max_source) : 0;
        float* weights = arena.take(step ? heads * step : padded(n));
        attend_row(s, at.projected + r * queries, at.attended + r * queries, n,
                   addresses_of(n, [&](int64_t t) { return source + t * key_values; }), weights, step);
        for (int64_t h = 0; step && h < heads; ++h)
          memcpy(e.weights + (r * heads + h) * e.max_source, weights + h * step, size_t(n) * sizeof(float));
      });
      apply(b.cross_out, at.attended, at.y, e.rows, queries, s.width, threads);
      return true;
    });
    residual.add(b.norms[2], [&](const float* x) { return feed_forward(s, b, at, x, e.rows, threads); });
  }
  if (s.last.weight) layer_norm(s.last, s.eps, e.x, e.x, e.rows, s.width);
  return all_finite(e.x, e.rows * s.width);
}

}  // namespace
}  // namespace regard
