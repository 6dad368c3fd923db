// Looking at the weights, given τ: all of them, the entropy of each row, its largest weights.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// Calls see(from, n, scores, weights) for each tile of a block that any row can see, both [key][lane].
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
void see_all(const Block& b, Finite& finite) {
  const int64_t offset = b.p.offset_of(b.p.found, b.unit);
  each_tile<Policy>(b, finite, [&](int64_t from, int n, const float*, const float* w) {
    to_rows(w, b.lanes, b.count, n, [&](int lane, int64_t j, vec x, int some) {
      store_some(reinterpret_cast<float*>(b.p.found.data) + b.at(b.p.found, offset, lane) + from + j, x, some);
    });
  });
}

// −Σ w log w; −inf where a weight is negative.
template <class Policy>
void see_entropy(const Block& b, Finite& finite) {
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
  const int64_t offset = b.p.offset_of(b.p.found, b.unit);
  for (int i = 0; i < b.count; ++i) reinterpret_cast<float*>(b.p.found.data)[b.at(b.p.found, offset, i)] = found.at[i];
}

// The largest weights of each row and their keys: a list per row, and one vector of what it takes to get in.
template <class Policy>
void see_top(const Block& b, Finite& finite) {
  const int64_t most = b.p.most;
  float* values = arena.take(b.lanes * most);
  int64_t* keys = arena.take<int64_t>(b.lanes * most);
  for (int64_t i = 0; i < b.lanes * most; ++i) values[i] = -INF, keys[i] = -1;
  PerLane least;
  for (int v = 0; v < b.lanes; v += W) least.set(v, splat(-INF));
  each_tile<Policy>(b, finite, [&](int64_t from, int n, const float* s, const float* w) {
    for (int v = 0; v < b.lanes; v += W)
      for (int j = 0; j < n; ++j) {
        const vec score = load(s + j * b.lanes + v), x = load(w + j * b.lanes + v);
        const ivec better = (x > least.get(v)) & (score > -INF);
        if (!any(better)) continue;
        for (int i = 0; i < W && v + i < b.count; ++i) {
          if (!better[i]) continue;
          float* list = values + (v + i) * most;
          int64_t* names = keys + (v + i) * most;
          int64_t at = most - 1;
          for (; at > 0 && list[at - 1] < x[i]; --at) list[at] = list[at - 1], names[at] = names[at - 1];
          list[at] = x[i];
          names[at] = b.p.first_key + from + j;
          least.at[v + i] = list[most - 1];
        }
      }
  });
  const int64_t offset = b.p.offset_of(b.p.found, b.unit), other = b.p.offset_of(b.p.found_keys, b.unit);
  for (int i = 0; i < b.count; ++i)
    for (int64_t k = 0; k < most; ++k) {
      const float x = values[i * most + k];
      reinterpret_cast<float*>(b.p.found.data)[b.at(b.p.found, offset, i) + k] = x == -INF ? 0 : x;
      reinterpret_cast<int64_t*>(b.p.found_keys.data)[b.at(b.p.found_keys, other, i) + k] = keys[i * most + k];
    }
}

template <void see(const Block&, Finite&)>
void look_item(void* context, int64_t index) {
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
bool look_all(const Problem& p, int threads) {
  Job job{p, Plan(p)};
  parallel(p.units() * job.plan.chunks, threads, look_item<see>, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
