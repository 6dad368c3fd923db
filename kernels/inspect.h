// Weights from τ: all weights, the entropy of each row, or the k largest weights of each row.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// Calls see(from, n, scores, weights) for each tile that any row of a block can see; both are [key][lane].
template <class Policy, class See>
void each_tile(const Block& b, Finite& finite, See see) {
  const Policy policy(b.p);
  float *s = arena.take(KEYS * b.lanes), *w = arena.take(KEYS * b.lanes);
  Tau tau;
  read_tau(b, tau);
  see_tau(b, tau, finite);
  if constexpr (Policy::fit == Fit::counted) count_keys(b, s, tau.count);
  Tally tally(b);
  for (int64_t from = b.low; from < b.high; from += KEYS) {
    const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
    if (b.hidden(from, from + n)) continue;
    b.scores(from, n, s);
    if (Policy::fit == Fit::counted) tally.add(b, n, s);
    for (int v = 0; v < b.lanes; v += W) {
      const Statistic row = read_row(policy, tau, v);
      for (int j = 0; j < n; ++j) {
        const vec weight = policy.weight(load(s + j * b.lanes + v), row);
        finite.see(weight);
        store(w + j * b.lanes + v, weight);
      }
    }
    if (b.p.threshold) drop(b, from, n, w);
    see(from, n, s, w);
  }
  if (Policy::fit == Fit::counted && !tally.agrees(b, tau.count)) finite.fail();
}

template <class Policy>
void write_weights(const Block& b, Finite& finite) {
  const int64_t offset = b.p.offset_of(b.p.result, b.unit);
  each_tile<Policy>(b, finite, [&](int64_t from, int n, const float*, const float* w) {
    to_rows(w, b.lanes, b.count, n, [&](int lane, int64_t j, vec x, int some) {
      store_some(reinterpret_cast<float*>(b.p.result.data) + b.at(b.p.result, offset, lane) + from + j, x, some);
    });
  });
}

// −Σ w log w; −inf if a weight is negative.
template <class Policy>
void write_entropy(const Block& b, Finite& finite) {
  PerLane found;
  for (int v = 0; v < b.lanes; v += W) found.set(v, vec{});
  each_tile<Policy>(b, finite, [&](int64_t, int n, const float*, const float* w) {
    for (int v = 0; v < b.lanes; v += W) {
      vec total{};
      for (int j = 0; j < n; ++j) {
        const vec x = load(w + j * b.lanes + v);
        total += x > 0.0f ? x * log(x) : (x < 0.0f ? splat(INF) : vec{});
      }
      found.set(v, found.get(v) - total);
    }
  });
  const int64_t offset = b.p.offset_of(b.p.result, b.unit);
  for (int i = 0; i < b.count; ++i)
    reinterpret_cast<float*>(b.p.result.data)[b.at(b.p.result, offset, i)] = found.at[i];
}

// The k largest weights of each row and their keys: a sorted list per row, and its smallest entry per lane.
template <class Policy>
void write_topk(const Block& b, Finite& finite) {
  const int64_t k = b.p.k;
  float* values = arena.take(b.lanes * k);
  int64_t* keys = arena.take<int64_t>(b.lanes * k);
  for (int64_t i = 0; i < b.lanes * k; ++i) values[i] = -INF, keys[i] = -1;
  PerLane smallest;
  for (int v = 0; v < b.lanes; v += W) smallest.set(v, splat(-INF));
  each_tile<Policy>(b, finite, [&](int64_t from, int n, const float* s, const float* w) {
    for (int v = 0; v < b.lanes; v += W)
      for (int j = 0; j < n; ++j) {
        const vec score = load(s + j * b.lanes + v), x = load(w + j * b.lanes + v);
        const ivec better = (x > smallest.get(v)) & (score > -INF);
        if (!any(better)) continue;
        for (int i = 0; i < W && v + i < b.count; ++i) {
          if (!better[i]) continue;
          float* list = values + (v + i) * k;
          int64_t* names = keys + (v + i) * k;
          int64_t at = k - 1;
          for (; at > 0 && list[at - 1] < x[i]; --at) list[at] = list[at - 1], names[at] = names[at - 1];
          list[at] = x[i];
          names[at] = b.p.first_key + from + j;
          smallest.at[v + i] = list[k - 1];
        }
      }
  });
  const int64_t offset = b.p.offset_of(b.p.result, b.unit), other = b.p.offset_of(b.p.indices, b.unit);
  for (int i = 0; i < b.count; ++i)
    for (int64_t rank = 0; rank < k; ++rank) {
      const float x = values[i * k + rank];
      reinterpret_cast<float*>(b.p.result.data)[b.at(b.p.result, offset, i) + rank] = x == -INF ? 0 : x;
      reinterpret_cast<int64_t*>(b.p.indices.data)[b.at(b.p.indices, other, i) + rank] = keys[i * k + rank];
    }
}

template <void see(const Block&, Finite&)>
void inspect_item(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const Span span = job.plan.item(index);
  const ItemScratch item;
  Finite finite;
  for (int64_t row = span.first; row < span.last;) {
    const BlockScratch scratch;
    const Block block(job.p, span.unit, row, span.last - row);
    see(block, finite);
    row += block.count;
  }
  job.report(finite);
}

template <void see(const Block&, Finite&)>
bool inspect_all(const Problem& p, int threads) {
  Job job{p, Plan(p)};
  parallel(p.units() * job.plan.chunks, threads, inspect_item<see>, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
