// Attention for one query per key head, with a plain dot product and softmax, as in a decoding step.
//
// A single row needs no lanes: the scores of all keys are computed first, then softmax, then the sum of the values.
// Memory latency dominates, so values are prefetched while keys are read, and the next unit's keys while values are
// read. Scores are rounded as in `match_few`, because the kernels in inspect.h recompute them for this τ.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// Maximum number of keys. For more keys, decode.h is faster: with 2,048 keys on Zen 5, it reaches 94 instead of 85 % of
// the bandwidth of a plain read from the L3 cache, and 93 instead of 89 % from memory. At 512 keys of 128 heads, it
// reaches 88 instead of 95 %.
constexpr int64_t SINGLE_KEYS = 512;

INLINE bool is_single(const Problem& p) {
  const int64_t vectors = p.width / W;
  const bool plain = p.family == Family::dot && p.softcap == 0 && p.biases + p.lines == 0 && !p.threshold && !p.sink;
  const bool open = p.terms == 0 || (p.terms == 1 && !p.allowed[0]);
  return plain && open && p.heads() * p.queries == 1 && p.keys <= SINGLE_KEYS && p.output &&
         p.output.type == Type::float32 && p.width % W == 0 &&
         (vectors == 1 || vectors == 2 || vectors == 4 || vectors == 8) && p.value_width == p.width &&
         stays(p.query, p.width, true) && stays(p.key, p.width, true) && stays(p.value, p.width, true);
}

// Addresses of a unit's query, keys and values, and the range of keys that it sees.
struct Single {
  const float *query, *key, *value;
  int64_t low, high;

  Single(const Problem& p, const Unit& unit) {
    query = reinterpret_cast<const float*>(p.query.data) + p.offset_of(p.query, unit);
    key = reinterpret_cast<const float*>(p.key.data) + p.offset_of(p.key, unit);
    value = reinterpret_cast<const float*>(p.value.data) + p.offset_of(p.value, unit);
    low = p.terms && p.start[0] ? integer(p.start[0], p.offset_of(p.start[0], unit)) - p.first_key : 0;
    high = p.terms && p.stop[0] ? integer(p.stop[0], p.offset_of(p.stop[0], unit)) - p.first_key : p.keys;
    if (low < 0) low = 0;
    if (high > p.keys) high = p.keys;
    if (high < low) high = low;
  }
};

template <int T>
INLINE void ask(const float* row) {
  for (int t = 0; t < T * W; t += 16) __builtin_prefetch(row + t, 0, 2);
}

// Computes the scores of n keys, padded with −inf to whole vectors; returns the largest.
template <int T>
INLINE float match_single(const Problem& p, const Single& at, int64_t n, float* s, Finite& finite) {
  vec q[T], tops = splat(-INF);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) q[t] = load(at.query + t * W) * p.scale;
  const float *key = at.key + at.low * p.key.row, *value = at.value + at.low * p.value.row;
  for (int64_t j = 0; j < n; j += W) {
    vec sums[W];
#pragma GCC unroll 16
    for (int k = 0; k < W; ++k) {
      const int64_t row = j + k < n ? j + k : n - 1;
      sums[k] = vec{};
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[k] += q[t] * load(key + row * p.key.row + t * W);
      ask<T>(value + row * p.value.row);
    }
    sum_each(sums);
    finite.see(sums[0]);
    store(s + j, sums[0]);
    for (int64_t k = n; k < j + W; ++k) s[k] = -INF;
    tops = max(tops, load(s + j));
  }
  float top = tops[0];
  for (int i = 1; i < W; ++i) top = tops[i] > top ? tops[i] : top;
  return top;
}

// Computes Σ weight · value and prefetches the next unit's keys.
template <int T>
INLINE void sum_single(const Problem& p, const Single& at, const Single& next, int64_t n, const float* s, vec* sums) {
  const float *value = at.value + at.low * p.value.row, *ahead = next.key + next.low * p.key.row;
  vec even[T] = {}, odd[T] = {};
  for (int64_t j = 0; j < n; j += 2) {
    const float* row = value + j * p.value.row;
    const float *second = j + 1 < n ? row + p.value.row : row, other = j + 1 < n ? s[j + 1] : 0;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      even[t] += s[j] * load(row + t * W);
      odd[t] += other * load(second + t * W);
    }
    ask<T>(ahead + j * p.key.row);
    ask<T>(ahead + (j + 1) * p.key.row);
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) sums[t] = even[t] + odd[t];
}

template <int T>
void single_item(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const Problem& p = job.p;
  const Unit unit = p.unit(index);
  const Single at(p, unit), next(p, p.unit(index + 1 < p.units() ? index + 1 : index));
  const Softmax policy(p);
  const int64_t n = at.high - at.low;
  alignas(64) float s[SINGLE_KEYS + W];
  Finite finite;
  const float top = match_single<T>(p, at, n, s, finite), known = top == -INF ? 0 : top;
  vec total{}, sums[T];
  for (int64_t j = 0; j < n; j += W) {
    const vec x = policy.power(load(s + j) - known);
    store(s + j, x);
    total += x;
  }
  sum_single<T>(p, at, next, n, s, sums);
  const float all = sum(total), inverse = top == -INF ? 0 : 1 / all;
  float* to = reinterpret_cast<float*>(p.output.data) + p.offset_of(p.output, unit);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    finite.see(sums[t] * inverse);
    store(to + t * W, sums[t] * inverse);
  }
  const float rest = top == -INF ? 0 : log(splat(all))[0] / policy.sharpness;
  if (p.tau) {
    float* tau = reinterpret_cast<float*>(p.tau.data) + p.offset_of(p.tau, unit);
    tau[0] = known;
    tau[p.tau.column] = rest;
  }
  finite.see(splat(known + rest));
  job.report(finite);
}

inline bool forward_single(const Problem& p, int threads) {
  Job job{p, Plan(p)};
  const auto work = p.width == W       ? single_item<1>
                    : p.width == 2 * W ? single_item<2>
                    : p.width == 4 * W ? single_item<4>
                                       : single_item<8>;
  parallel(p.units(), worth(p, threads), work, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
