// The row statistic τ of a block, for normalizers that need it before the output.
#pragma once

#include "block.h"
#include "normalizers.h"

namespace regard {
namespace {

// One value per lane, accessed as vectors.
struct PerLane {
  alignas(64) float at[LANES];
  INLINE vec get(int v) const { return load(at + v); }
  INLINE void set(int v, vec x) { store(at + v, x); }
};

struct Tau {
  PerLane top, rest, count;
};

// Returns the row statistic in the form that the policy expects. Only counted normalizers use the number of keys.
template <class Policy>
INLINE Statistic read_row(const Policy& policy, const Tau& tau, int v) {
  return policy.read(tau.top.get(v), tau.rest.get(v), Policy::fit == Fit::counted ? tau.count.get(v) : vec{});
}

// Counts the keys that each row can see: keys hidden neither by the mask nor by a bias of −inf.
inline void count_keys(const Block& b, float* buffer, PerLane& count) {
  for (int v = 0; v < b.lanes; v += W) count.set(v, vec{});
  const bool plain = b.p.biases == 0 && b.p.lines == 0;
  for (int64_t from = b.low; from < b.high; from += KEYS) {
    const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
    if (b.hidden(from, from + n)) continue;
    if (plain && b.open(from, from + n)) {
      for (int v = 0; v < b.lanes; v += W) count.set(v, count.get(v) + float(n));
      continue;
    }
    for (int i = 0; i < n * b.lanes; i += W) store(buffer + i, vec{});
    for (int i = 0; i < b.p.biases; ++i) b.add_bias(b.p.bias[i], from, n, buffer);
    for (int i = 0; i < b.p.lines; ++i) b.add_line(b.p.line[i], from, n, buffer);
    if (!b.open(from, from + n)) b.hide(from, n, buffer);
    for (int v = 0; v < b.lanes; v += W) {
      vec seen = count.get(v);
      for (int j = 0; j < n; ++j) seen += load(buffer + j * b.lanes + v) == -INF ? vec{} : splat(1);
      count.set(v, seen);
    }
  }
  for (int v = 0; v < b.lanes; v += W) count.set(v, max(count.get(v), splat(1)));
}

inline void fit_counted(const Block& b, float* buffer, Tau& tau) {
  count_keys(b, buffer, tau.count);
  for (int v = 0; v < b.lanes; v += W) {
    tau.top.set(v, vec{});
    const bool shifts = b.p.normalizer == Normalizer::sigmoid;
    tau.rest.set(v, !shifts ? vec{} : splat(-b.p.offset));
  }
  for (int i = 0; b.p.counts && i < b.lanes; ++i) tau.rest.at[i] = float(__builtin_log(tau.count.at[i]));
}

// Checks that the scores agree with the number of visible keys. A finite bias may have turned a score into −inf, which
// hides its key. A row with a score of +inf or NaN has undefined weights.
struct Tally {
  PerLane seen;
  ivec broken{};

  explicit Tally(const Block& b) {
    for (int v = 0; v < b.lanes; v += W) seen.set(v, vec{});
  }
  void add(const Block& b, int n, const float* s) {
    for (int v = 0; v < b.lanes; v += W) {
      vec more{};
      for (int j = 0; j < n; ++j) {
        const vec score = load(s + j * b.lanes + v);
        more += score == -INF ? vec{} : splat(1);
        broken |= ~(score < INF);
      }
      seen.set(v, seen.get(v) + more);
    }
  }
  bool agrees(const Block& b, const PerLane& count) const {
    if (any(broken)) return false;
    for (int i = 0; i < b.count; ++i)
      if (seen.at[i] != count.at[i] && !(seen.at[i] == 0 && count.at[i] == 1)) return false;
    return true;
  }
};

// Computes all scores of the block, [key][lane]; −inf for keys that no row sees.
inline void all_scores(const Block& b, float* scores, float* slopes) {
  for (int64_t from = b.low; from < b.high; from += KEYS) {
    const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
    float* at = scores + (from - b.low) * b.lanes;
    if (b.hidden(from, from + n))
      for (int i = 0; i < n * b.lanes; i += W) store(at + i, splat(-INF));
    else
      b.scores(from, n, at, slopes ? slopes + (from - b.low) * b.lanes : nullptr);
  }
}

// Solves Σ φ(score − τ) = 1 by Newton's method. Only scores close to the maximum can have a nonzero weight; they are
// collected first.
template <class Policy>
void fit_root(const Block& b, const float* scores, float* buffer, Tau& tau) {
  const int64_t keys = b.high - b.low;
  for (int v = 0; v < b.lanes; v += W) {
    vec top = splat(-INF);
    for (int64_t j = 0; j < keys; ++j) top = max(top, load(scores + j * b.lanes + v));
    top = top == -INF ? vec{} : top;
    int64_t near = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const vec x = (load(scores + j * b.lanes + v) - top) * Policy::steepness;
      if (any(!(x <= -1.0f))) store(buffer + W * near++, x);
    }
    vec root = splat(-1);
    const vec edge = splat(Policy::edge(float(near ? near : 1)));
    bool climbs = true;
    for (int round = 0; round < 60; ++round) {
      vec values{}, slopes{};
      for (int64_t j = 0; j < near;) {  // partial sums: a single sum of thousands of equal values would lose precision
        const int64_t end = j + 64 < near ? j + 64 : near;
        vec value{}, slope{};
        for (; j < end; ++j) Policy::gather(load(buffer + W * j) - root, value, slope);
        values += value;
        slopes += slope;
      }
      const ivec active = ~(slopes <= 0.0f) | (values != values);  // propagate NaN
      const vec ahead = root + Policy::step(values, slopes);
      const vec next = active ? min(edge, climbs ? max(root, ahead) : ahead) : root;
      const bool moved = any(next != root);
      root = next;
      if (climbs && !moved) {  // converged from the left; two unconstrained Newton steps correct overshoot
        climbs = false;
        round = 57;
      }
    }
    tau.top.set(v, top);
    tau.rest.set(v, near ? root / Policy::steepness : vec{});
  }
}

// Reads τ from the forward pass.
inline void read_tau(const Block& b, Tau& tau) {
  const int64_t offset = b.p.offset_of(b.p.tau, b.unit);
  for (int i = 0; i < b.lanes; ++i) {
    const int64_t at = b.at(b.p.tau, offset, i);
    tau.top.at[i] = number(b.p.tau, at);
    tau.rest.at[i] = number(b.p.tau, at + b.p.tau.column);
  }
}

inline void write_tau(const Block& b, const Tau& tau) {
  if (!b.p.tau) return;
  const View& view = b.p.tau;
  const int64_t offset = b.p.offset_of(view, b.unit);
  if (b.one_head() && view.row == 2 && view.column == 1) {  // without computing each address
    float* first = reinterpret_cast<float*>(view.data) + b.at(view, offset, 0);
    for (int i = 0; i < b.count; ++i) {
      first[2 * i] = tau.top.at[i];
      first[2 * i + 1] = tau.rest.at[i];
    }
    return;
  }
  for (int i = 0; i < b.count; ++i) {
    float* at = reinterpret_cast<float*>(view.data) + b.at(view, offset, i);
    at[0] = tau.top.at[i];
    at[view.column] = tau.rest.at[i];
  }
}

}  // namespace
}  // namespace regard
