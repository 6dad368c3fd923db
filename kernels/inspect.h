// Results computed from the known τ: all weights, the entropy of each row, the k largest weights of each row, or sums
// over sets of keys.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// Calls see(from, n, scores, weights) for each tile that any row of a block can see. Scores and weights: [key][lane].
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
    to_rows(w, b.lanes, b.count, n, [&](int lane, int64_t j, vec x, int count) {
      store_some(reinterpret_cast<float*>(b.p.result.data) + b.at(b.p.result, offset, lane) + from + j, x, count);
    });
  });
}

// −Σ w log w; −inf if a weight is negative.
template <class Policy>
void write_entropy(const Block& b, Finite& finite) {
  PerLane entropy;
  for (int v = 0; v < b.lanes; v += W) entropy.set(v, vec{});
  each_tile<Policy>(b, finite, [&](int64_t, int n, const float*, const float* w) {
    for (int v = 0; v < b.lanes; v += W) {
      vec total{};
      for (int j = 0; j < n; ++j) {
        const vec x = load(w + j * b.lanes + v);
        total += x > 0.0f ? x * log(x) : (x < 0.0f ? splat(INF) : vec{});
      }
      entropy.set(v, entropy.get(v) - total);
    }
  });
  const int64_t offset = b.p.offset_of(b.p.result, b.unit);
  for (int i = 0; i < b.count; ++i)
    reinterpret_cast<float*>(b.p.result.data)[b.at(b.p.result, offset, i)] = entropy.at[i];
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

// The sets of keys over which write_sums sums the weights of a block's rows: [set][lane].
//
//   spans    k intervals, start ≤ key < stop
//   matches  MATCHES sets, or none: the keys before stop whose token in this set is the row's token
struct KeySets {
  const int spans, matches;
  int32_t *start, *stop, *token;
  int64_t *low, *high;  // for each set, no row includes keys outside [low, high)
  PerLane center;

  explicit KeySets(const Block& b) : spans(int(b.p.k)), matches(b.p.token ? MATCHES : 0) {
    const int sets = spans + matches;
    start = arena.take<int32_t>(sets * b.lanes);
    stop = arena.take<int32_t>(sets * b.lanes);
    token = arena.take<int32_t>(matches * b.lanes);
    low = arena.take<int64_t>(sets);
    high = arena.take<int64_t>(sets);
    const Problem& p = b.p;
    const int64_t center_at = p.offset_of(p.center, b.unit), span_at = p.offset_of(p.span, b.unit),
                  token_at = p.offset_of(p.token, b.unit);
    for (int i = 0; i < b.lanes; ++i) center.at[i] = number(p.center, b.at(p.center, center_at, i)) - p.first_key;
    for (int set = 0; set < sets; ++set) {
      low[set] = p.keys;
      high[set] = 0;
      for (int i = 0; i < b.lanes; ++i) {
        int64_t begin = 0, end = 0;
        if (set < spans) {
          const int64_t at = b.at(p.span, span_at, i) + 2 * set * p.span.column;
          begin = integer(p.span, at) - p.first_key;
          end = integer(p.span, at + p.span.column) - p.first_key;
        } else {
          const int64_t at = b.at(p.token, token_at, i) + 2 * (set - spans) * p.token.column;
          token[(set - spans) * b.lanes + i] = int32_t(integer(p.token, at));
          end = integer(p.token, at + p.token.column) - p.first_key;
        }
        begin = begin < 0 ? 0 : begin > p.keys ? p.keys : begin;
        end = end < begin ? begin : end > p.keys ? p.keys : end;
        start[set * b.lanes + i] = int32_t(begin);
        stop[set * b.lanes + i] = int32_t(end);
        if (begin < end && begin < low[set]) low[set] = begin;
        if (end > high[set] && begin < end) high[set] = end;
      }
    }
  }
};

// Adds the weights of a tile to the sums over one set; for a match, also updates the largest weight. sums: [lane].
template <bool matched>
void add_set(const Block& b, const KeySets& sets, int set, int64_t from, int n, const float* w, float* sums) {
  const int first = int(sets.low[set] > from ? sets.low[set] - from : 0);
  const int last = int(sets.high[set] < from + n ? sets.high[set] - from : n);
  if (first >= last) return;
  const View& view = b.p.key_token;
  const int match = set - sets.spans;
  const int64_t tokens_at = matched ? b.p.offset_of(view, b.unit) + from * view.row + match * view.column : 0;
  int32_t tokens[KEYS];
  for (int j = first; matched && j < last; ++j) tokens[j] = int32_t(integer(view, tokens_at + j * view.row));
  for (int v = 0; v < b.lanes; v += W) {
    const ivec begin = load(sets.start + set * b.lanes + v), end = load(sets.stop + set * b.lanes + v);
    const ivec token = matched ? load(sets.token + match * b.lanes + v) : ivec{};
    vec total{}, largest = matched ? load(sums + b.lanes + v) : vec{};
    for (int j = first; j < last; ++j) {
      const ivec key = ivec{} + int32_t(from + j);
      ivec inside = (key >= begin) & (key < end);
      if constexpr (matched) inside &= token == tokens[j];
      const vec x = inside ? load(w + j * b.lanes + v) : vec{};
      total += x;
      if constexpr (matched) largest = max(x, largest);
    }
    store(sums + v, load(sums + v) + total);
    if constexpr (matched) store(sums + b.lanes + v, largest);
  }
}

// Writes for each row: Σ w, −Σ w log w, Σ w |key − center| and the largest weight (at least 0); then Σ w over each
// span; then Σ w and the largest weight over each match.
template <class Policy>
void write_sums(const Block& b, Finite& finite) {
  const KeySets sets(b);
  const int columns = 4 + sets.spans + 2 * sets.matches;
  float* sums = arena.take(columns * b.lanes);  // [column][lane]
  for (int i = 0; i < columns * b.lanes; i += W) store(sums + i, vec{});
  each_tile<Policy>(b, finite, [&](int64_t from, int n, const float*, const float* w) {
    for (int v = 0; v < b.lanes; v += W) {
      float* at[4];
      for (int c = 0; c < 4; ++c) at[c] = sums + c * b.lanes + v;
      vec total{}, entropy{}, distance{}, largest = load(at[3]);
      for (int j = 0; j < n; ++j) {
        const vec x = load(w + j * b.lanes + v), away = sets.center.get(v) - float(from + j);
        total += x;
        entropy += x > 0.0f ? x * log(x) : (x < 0.0f ? splat(INF) : vec{});
        distance += x * max(away, -away);
        largest = max(x, largest);
      }
      store(at[0], load(at[0]) + total);
      store(at[1], load(at[1]) - entropy);
      store(at[2], load(at[2]) + distance);
      store(at[3], largest);
    }
    float* at = sums + 4 * b.lanes;
    for (int set = 0; set < sets.spans; ++set, at += b.lanes) add_set<false>(b, sets, set, from, n, w, at);
    for (int m = 0; m < sets.matches; ++m, at += 2 * b.lanes) add_set<true>(b, sets, sets.spans + m, from, n, w, at);
  });
  const int64_t offset = b.p.offset_of(b.p.result, b.unit);
  for (int i = 0; i < b.count; ++i)
    for (int c = 0; c < columns; ++c)
      reinterpret_cast<float*>(b.p.result.data)[b.at(b.p.result, offset, i) + c] = sums[c * b.lanes + i];
}

template <void see(const Block&, Finite&)>
void inspect_item(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const Span span = job.plan.item(index);
  const ItemScratch item;
  const TileScope tiles(job.p);
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
