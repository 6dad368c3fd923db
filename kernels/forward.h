// Forward pass: output = Σ_j weight_j · value_j and τ of each row, one tile of keys at a time.
//
// online:   with the running maximum m and sum l, each tile turns its scores into p = exp(s − m) and updates
//           output ← output · exp(m_before − m) + p · value; at the end, output ← output / l and τ = m + log l.
// counted:  the weights depend only on the score and the number of keys, and are summed directly.
// root:     τ is computed from all scores; then only keys with a nonzero weight in some row are read.
#pragma once

#include <optional>

#include "few_queries.h"
#include "tau.h"

namespace regard {
namespace {

// The rows of an item: rows [first, last) of one unit.
struct Span {
  int64_t unit, first, last;
};

// Divides rows into items. The division depends only on the sizes, so results do not depend on the number of threads.
struct Plan {
  int64_t queries, rows, chunk, chunks;  // rows per head, per unit, per item; items per unit
  bool per_head;                         // an item stays within one head

  explicit Plan(const Problem& p) {
    const int64_t heads = p.heads();
    queries = p.queries;
    rows = heads * queries;
    per_head = queries >= 2 * LANES;
    if (!per_head) {  // few queries: an item spans several heads
      const bool many = p.units() * ((rows + LANES - 1) / LANES) >= 64;
      chunk = !many ? LANES : rows < 4 * LANES ? rows : (4 * LANES + p.queries - 1) / p.queries * p.queries;
    } else {
      const int64_t blocks = p.units() * heads * ((p.queries + LANES - 1) / LANES);
      chunk = (blocks < 64 ? 1 : 4) * LANES;
    }
    if (p.kept_weights) chunk = rows;  // the same blocks as in the backward pass
    if (chunk < 1) chunk = 1;
    chunks = per_head ? heads * ((p.queries + chunk - 1) / chunk) : (rows + chunk - 1) / chunk;
  }

  Span item(int64_t index) const {
    const int64_t unit = index / chunks, i = index % chunks;
    if (!per_head) return {unit, i * chunk, i * chunk + chunk < rows ? i * chunk + chunk : rows};
    const int64_t each = (queries + chunk - 1) / chunk, head = i / each, at = i % each * chunk;
    return {unit, head * queries + at, head * queries + (at + chunk < queries ? at + chunk : queries)};
  }
};

// Records whether a result is infinite or NaN; `tiled` then recomputes the call with NaN-safe operations.
struct Finite {
  vec zero{};
  INLINE void see(vec x) { zero += x * 0.0f; }
  INLINE void see(const float* x, int64_t count) {
    if (!all_finite(x, count)) fail();
  }
  void fail() { zero += INF * 0.0f; }
  bool all() const { return sum(zero) == 0; }
};

// Whether weights are multiplied by values as tiles.
INLINE bool in_tiles(const Problem& p) { return TILES && p.value.type == Type::bfloat16; }

struct Output {
  float* sums;            // [lane][step]
  int64_t width, stride;  // value width, and padded value width
  ptrdiff_t step;
  bool begun = false, written = false;

  // in_place: compute the sums in the output itself, if its layout allows it. The factors must then be 1.
  explicit Output(const Block& b, bool in_place = false)
      : width(b.p.value_width), stride(padded(b.p.value_width)), step(ptrdiff_t(stride)) {
    const View& view = b.p.output;
    if (in_place && b.one_head() && view && stays(view, width, true)) {
      sums = reinterpret_cast<float*>(view.data) + b.at(view, b.p.offset_of(view, b.unit), 0);
      step = view.row;
      written = true;
      return;
    }
    sums = arena.take(b.lanes * stride);
  }

  // Adds the values of n keys, starting at `from`. buffer: see `values_buffer`.
  void add(const Block& b, const float* weights, int64_t from, int n, float* buffer) {
    if (in_tiles(b.p)) return add_tiles(b, weights, from, n, buffer);
    add(b, weights, stage(b.p.value, b.value_at, from, n, width, true, buffer), n);
  }

  void add(const Block& b, const float* weights, Rows values, int n) {
    if (stride)
      multiply<Walk::down>({weights, b.lanes, values.at, values.step, sums, step, b.ahead}, b.count, int(stride / W), n,
                           begun);
    begun = true;
  }

  void add_tiles(const Block& b, const float* weights, int64_t from, int n, float* buffer) {
    const View& view = b.p.value;
    const auto add = [&](auto read, float* memory) {
      multiply_weights(weights, b.lanes, read, sums, step, b.count, int(stride / W), n, begun, memory, b.ahead);
    };
    const int64_t row = view.row, at = b.value_at + from * row;
    if (view.column == 1 && width == stride) {
      const auto* values = reinterpret_cast<const uint16_t*>(view.data) + at;
      add([=](int64_t j, int64_t t) { return read(values + j * row + t); }, buffer);
    } else {
      const Rows values = stage(view, b.value_at, from, n, width, true, buffer);
      add([=](int64_t j, int64_t t) { return load(values.at + j * values.step + t); }, buffer + n * stride);
    }
    begun = true;
  }

  void add_rows(const Block& b, const float* weights, Rows values, int n) {  // [lane][MANY]
    if (stride)
      multiply<Walk::along>({weights, MANY, values.at, values.step, sums, ptrdiff_t(stride)}, b.count, int(stride / W),
                            n, begun);
    begun = true;
  }

  void add_in_place(const Block& b, const float* weights, int64_t from, int n) {  // [lane][MANY]
    with_type(b.p, [&](auto type) { regard::add_in_place(b, weights, from, n, sums, begun, type); });
    begun = true;
  }

  void scale(const Block& b, const float* factors) {
    for (int i = 0; begun && i < b.count; ++i)
      if (factors[i] != 1.0f)
        for (int64_t t = 0; t < stride; t += W) store(sums + i * stride + t, load(sums + i * stride + t) * factors[i]);
  }

  void write(const Block& b, const float* factors, Finite& finite) const {
    for (int i = 0; written && i < b.count; ++i) finite.see(sums + i * step, width);
    if (written) return;
    const View& view = b.p.output;
    const int64_t offset = b.p.offset_of(view, b.unit);
    if (view.type != Type::float32) return write_halves(b, factors, finite);
    vec zero[4] = {};  // independent sums, because each addition waits for the one before
    for (int i = 0; i < b.count; ++i) {
      float* to = reinterpret_cast<float*>(view.data) + b.at(view, offset, i);
      int64_t t = 0;
      for (; begun && t + 4 * W <= width; t += 4 * W)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const vec x = load(sums + i * stride + t + k * W) * factors[i];
          zero[k] += x * 0.0f;
          store(to + t + k * W, x);
        }
      for (; t < stride; t += W) {
        const vec x = begun ? load(sums + i * stride + t) * factors[i] : vec{};
        zero[0] += x * 0.0f;
        store_some(to + t, x, int(width - t < W ? width - t : W));
      }
    }
    finite.see((zero[0] + zero[1]) + (zero[2] + zero[3]));
  }

  void write_halves(const Block& b, const float* factors, Finite& finite) const {
    const View& view = b.p.output;
    const int64_t offset = b.p.offset_of(view, b.unit);
    vec zero{};
    for (int i = 0; i < b.count; ++i)
      for (int64_t t = 0; t < stride; t += W) {
        const vec x = begun ? load(sums + i * stride + t) * factors[i] : vec{};
        zero += x * 0.0f;
        store_as(view, b.at(view, offset, i) + t, x, int(width - t < W ? width - t : W));
      }
    finite.see(zero);
  }
};

INLINE void drop(const Block& b, int64_t from, int n, float* weights) {
  for (int j = 0; j < n; ++j)
    for (int v = 0; v < b.lanes; v += W) {
      float* at = weights + j * b.lanes + v;
      store(at, load(at) * b.keep(from + j, v));
    }
}

// Applies softmax to one tile: computes the new maximum and the factor for earlier tiles, and exp in place. Returns
// whether all scores are finite.
template <int V>
INLINE bool soften_as(const Power power, int n, float* s, PerLane& top, PerLane& total, PerLane& factor) {
  vec now[V], known[V], sums[V], zero[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) now[v] = top.get(v * W), sums[v] = zero[v] = vec{};
  for (int j = 0; j < n; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const vec x = load(s + (j * V + v) * W);
      now[v] = max(now[v], x);
      zero[v] += x * 0.0f;
    }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    known[v] = now[v] == -INF ? vec{} : now[v];
    factor.set(v * W, power(top.get(v * W) - known[v]));
    top.set(v * W, now[v]);
  }
  for (int j = 0; j < n; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* at = s + (j * V + v) * W;
      const vec x = power(load(at) - known[v]);
      store(at, x);
      sums[v] += x;
    }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) total.set(v * W, total.get(v * W) * factor.get(v * W) + sums[v]);
  bool finite = true;
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) finite &= !any(zero[v] != 0.0f);
  return finite;
}

INLINE bool soften(const Block& b, const Softmax& policy, int n, float* s, PerLane& top, PerLane& total,
                   PerLane& factor) {
  switch (b.vectors) {
    case 1: return soften_as<1>(policy.power, n, s, top, total, factor);
    case 2: return soften_as<2>(policy.power, n, s, top, total, factor);
    case 3: return soften_as<3>(policy.power, n, s, top, total, factor);
    default: return soften_as<MAX_VECTORS>(policy.power, n, s, top, total, factor);
  }
}

// The running maximum and sum of softmax.
struct Running {
  PerLane top, total;

  Running(const Block& b, bool sink) {
    const int64_t offset = sink ? b.p.offset_of(b.p.sink, b.unit) : 0;
    for (int i = 0; i < b.lanes; ++i)
      top.at[i] = sink ? number(b.p.sink, offset + b.head[i] * b.p.per_head(b.p.sink)) : -INF;
    for (int v = 0; v < b.lanes; v += W) total.set(v, top.get(v) == -INF ? vec{} : splat(1));
  }

  // Computes τ = top + rest, and 1 / total.
  void finish(const Block& b, const Softmax& policy, Tau& tau, PerLane& inverse) const {
    for (int v = 0; v < b.lanes; v += W) {
      const vec l = total.get(v), t = top.get(v);
      const auto empty = t == -INF;
      tau.top.set(v, t == -INF ? vec{} : t);
      tau.rest.set(v, empty ? vec{} : log(l) / policy.sharpness);
      inverse.set(v, empty ? vec{} : 1.0f / l);
    }
  }
};

// Computes the scores of one tile and applies softmax. Scores that are plain products, visible to every row, are
// checked for overflow in the pass that finds their maximum.
INLINE void soften_scores(const Block& b, const Softmax& policy, int64_t from, int n, float* s, Running& run,
                          PerLane& factor) {
  const bool plain = !b.few && b.p.family == Family::dot && b.plain(from, from + n);
  if (plain)
    b.plain_scores(from, n, s);
  else
    b.scores(from, n, s);
  const bool finite = soften(b, policy, n, s, run.top, run.total, factor);
  if (plain && !finite) b.overflowed = true;
}

// Returns a buffer for a tile of values, or nullptr if the values can be read in place.
INLINE float* values_buffer(const Block& b) {
  const int64_t width = b.p.value_width, keys = b.tile_keys(), stride = padded(width);
  if (stays(b.p.value, width, true)) return nullptr;
  return arena.take(keys * stride + (in_tiles(b.p) ? weights_buffer(keys, b.lanes, stride) : 0));
}

// The tensors of the next unit, to be prefetched while this one is computed, if units are so small that both fit into
// the L2 cache.
struct NextUnit {
  const Problem& p;
  const Unit unit;
  Ahead ahead;
  const bool fits;

  NextUnit(const Problem& p, int64_t index)
      : p(p),
        unit(p.unit(index)),
        fits(index < p.units() && p.heads() == 1 &&
             p.keys * (p.width + p.value_width) + p.queries * p.width <= MAX_FLOATS) {}

  void add(const View& view, int64_t rows, int64_t width, bool writes = false) {
    const int64_t size = bytes_of(view.type);
    if (fits && view && view.column == 1)
      ahead.add(view.data + p.offset_of(view, unit) * size, rows, width * size, view.row * size, writes);
  }

 private:
  static constexpr int64_t MAX_FLOATS = 1 << 14;
};

// Softmax vectorized over the keys, [lane][key]: with few rows, most lanes would be empty otherwise.
INLINE float soften_row(const Power power, int n, float* row, float& top, float& total) {
  for (int j = n; j < padded(n); ++j) row[j] = -INF;
  vec tops = splat(top), sums{};
  for (int j = 0; j < n; j += W) tops = max(tops, load(row + j));
  float now = tops[0];
  for (int i = 1; i < W; ++i) now = tops[i] > now ? tops[i] : now;
  const float known = now == -INF ? 0 : now;
  const float fade = power(splat(top - known))[0];
  for (int j = 0; j < n; j += W) {
    const vec x = power(load(row + j) - known);
    store(row + j, x);
    sums += x;
  }
  top = now;
  total = total * fade + sum(sums);
  return fade;
}

INLINE void sum_few(const Block& b, const Softmax& policy, int64_t low, int64_t high, Running& run, Output& output) {
  float *s = arena.take(KEYS * b.lanes), *buffer = values_buffer(b), *rows = arena.take(MAX_FEW * MANY);
  PerLane factor;
  // use longer tiles if nothing has to be copied: long sequential reads are faster. Tiles have about the same number of
  // bytes for each type.
  const bool plain = b.plain(low, high);
  const bool direct = plain && in_place(b.p);
  const int max_keys = !direct ? KEYS : b.p.key.type == Type::float32 ? MANY_FLOATS : MANY;
  for (int64_t from = low; from < high; from += max_keys) {
    const int n = int(high - from < max_keys ? high - from : max_keys);
    if (b.hidden(from, from + n)) continue;
    if (plain) {
      if (direct)
        with_type(b.p, [&](auto type) { match_in_place(b, from, n, rows, type); });
      else
        b.match_few(b.keys_from(from, n, true), n, rows, 1, MANY);
      if (b.p.key.type == Type::int8) scale_rows(b, b.p.key_scale, from, n, rows);
      for (int i = 0; i < b.count; ++i) b.overflowed |= !all_finite(rows + i * MANY, n);
    } else {
      b.scores(from, n, s);
      for (int i = 0; i < b.count; ++i)
        for (int j = 0; j < n; ++j) rows[i * MANY + j] = s[j * b.lanes + i];
    }
    for (int i = 0; i < b.count; ++i) {
      float* row = rows + i * MANY;
      factor.at[i] = soften_row(policy.power, n, row, run.top.at[i], run.total.at[i]);
      for (int j = 0; b.p.threshold && j < n; ++j) row[j] *= b.keep(from + j, 0)[i];
    }
    if (b.p.value.type == Type::int8) scale_rows(b, b.p.value_scale, from, n, rows);
    output.scale(b, factor.at);
    if (direct)
      output.add_in_place(b, rows, from, n);
    else
      output.add_rows(b, rows, stage(b.p.value, b.value_at, from, n, b.p.value_width, true, buffer), n);
  }
}

INLINE void sum_softly(const Block& b, const Softmax& policy, int64_t low, int64_t high, Running& run, Output& output) {
  if (b.few) return sum_few(b, policy, low, high, run, output);
  float *s = arena.take(KEYS * b.lanes), *buffer = values_buffer(b);
  PerLane factor;
  for (int64_t from = low; from < high; from += KEYS) {
    const int n = int(high - from < KEYS ? high - from : KEYS);
    if (b.hidden(from, from + n)) continue;
    soften_scores(b, policy, from, n, s, run, factor);
    output.scale(b, factor.at);
    if (b.p.threshold) drop(b, from, n, s);
    b.scale_values(from, n, s);
    output.add(b, s, from, n, buffer);
  }
}

template <class Policy>
void sum_counted(const Block& b, const Policy& policy, Tau& tau, Output& output, Finite& finite) {
  float *s = arena.take(KEYS * b.lanes), *buffer = values_buffer(b);
  fit_counted(b, s, tau);
  Tally tally(b);
  for (int64_t from = b.low; from < b.high; from += KEYS) {
    const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
    if (b.hidden(from, from + n)) continue;
    b.scores(from, n, s);
    tally.add(b, n, s);
    for (int v = 0; v < b.lanes; v += W) {
      const Statistic row = read_row(policy, tau, v);
      for (int j = 0; j < n; ++j) store(s + j * b.lanes + v, policy.weight(load(s + j * b.lanes + v), row));
    }
    if (b.p.threshold) drop(b, from, n, s);
    b.scale_values(from, n, s);
    output.add(b, s, from, n, buffer);
  }
  if (!tally.agrees(b, tau.count)) finite.fail();
}

// Finds the keys, relative to the block's first key, whose score exceeds τ in some row.
inline int64_t find_support(const Block& b, const float* scores, const Tau& tau, int64_t* support) {
  int64_t support_size = 0;
  for (int64_t j = 0; j < b.high - b.low; ++j) {
    ivec seen{};
    for (int v = 0; v < b.lanes; v += W) seen |= load(scores + j * b.lanes + v) - tau.top.get(v) > tau.rest.get(v);
    if (any(seen)) support[support_size++] = j;
  }
  return support_size;
}

template <class Policy>
void sum_sparsely(const Block& b, const Policy& policy, Tau& tau, Output& output) {
  const int64_t keys = b.high - b.low;
  // s holds the scores for Newton's method, then a tile of weights
  float *scores = arena.take(keys * b.lanes), *s = arena.take(keys * W > KEYS * b.lanes ? keys * W : KEYS * b.lanes);
  float* buffer = arena.take(b.tile_keys() * output.stride);
  int64_t* support = arena.take<int64_t>(keys);
  all_scores(b, scores, nullptr);
  fit_root<Policy>(b, scores, s, tau);
  const int64_t support_size = find_support(b, scores, tau, support);
  const View& scale = b.p.value_scale;
  const int64_t scale_at = b.p.offset_of(scale, b.unit) + b.low * scale.row;
  for (int64_t at = 0; at < support_size; at += KEYS) {
    const int n = int(support_size - at < KEYS ? support_size - at : KEYS);
    for (int i = 0; i < n; ++i) {
      const int64_t j = support[at + i];
      for (int v = 0; v < b.lanes; v += W) {
        const Statistic row = read_row(policy, tau, v);
        vec weight = policy.weight(load(scores + j * b.lanes + v), row);
        if (b.p.threshold) weight *= b.keep(b.low + j, v);
        if (b.p.value.type == Type::int8) weight *= number(scale, scale_at + j * scale.row);
        store(s + i * b.lanes + v, weight);
      }
      stage_row(buffer + i * output.stride, b.p.value, b.value_at + (b.low + j) * b.p.value.row, output.width,
                output.stride);
    }
    output.add(b, s, {buffer, ptrdiff_t(output.stride)}, n);
  }
}

// Records whether τ is finite. If it is not, the weights of the row are undefined, whatever the normalizer.
INLINE void see_tau(const Block& b, const Tau& tau, Finite& finite) {
  for (int v = 0; v < b.lanes; v += W) finite.see(tau.top.get(v)), finite.see(tau.rest.get(v));
}

// Softmax over a single tile: the weights are normalized before they are multiplied by the values.
inline void forward_tile(const Block& b, Finite& finite) {
  const Softmax policy(b.p);
  Output output(b, true);
  Running run(b, bool(b.p.sink));
  Tau tau;
  PerLane factor, inverse;
  const int n = int(b.high - b.low);
  float* s = b.keeps ? b.kept_weights() : arena.take(n * b.lanes);
  soften_scores(b, policy, b.low, n, s, run, factor);
  run.finish(b, policy, tau, inverse);
  for (int v = 0; v < b.lanes; v += W) {
    const vec x = inverse.get(v);
    for (int j = 0; j < n; ++j) store(s + j * b.lanes + v, load(s + j * b.lanes + v) * x);
    factor.set(v, splat(1));
  }
  if (b.p.threshold) drop(b, b.low, n, s);
  b.scale_values(b.low, n, s);
  output.add(b, s, b.low, n, values_buffer(b));
  see_tau(b, tau, finite);
  if (b.overflowed) finite.fail();
  write_tau(b, tau);
  output.write(b, factor.at, finite);
}

template <class Policy>
void forward_block(const Block& b, Finite& finite) {
  if constexpr (Policy::fit == Fit::online)
    if (!b.few && b.low < b.high && b.high - b.low <= KEYS && b.p.output) return forward_tile(b, finite);
  const Policy policy(b.p);
  Output output(b);
  Tau tau;
  PerLane factor;
  if constexpr (Policy::fit == Fit::online) {
    Running run(b, bool(b.p.sink));
    sum_softly(b, policy, b.low, b.high, run, output);
    run.finish(b, policy, tau, factor);
  } else {
    if constexpr (Policy::fit == Fit::counted)
      sum_counted(b, policy, tau, output, finite);
    else
      sum_sparsely(b, policy, tau, output);
    for (int v = 0; v < b.lanes; v += W) factor.set(v, splat(1));
  }
  see_tau(b, tau, finite);
  if (b.overflowed) finite.fail();
  write_tau(b, tau);
  output.write(b, factor.at, finite);
}

struct Job {
  const Problem& p;
  Plan plan;
  bool finite = true;

  void report(const Finite& seen) {
    if (!seen.all()) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
  }
};

// The problem of an item. bfloat16 and float16 keys and values that several blocks read are converted to float32 once,
// unless they do not fit into the L2 cache or are multiplied as pairs. Keys can be multiplied as pairs in every call,
// values only with tiles or in the backward pass.
class ItemProblem {
 public:
  ItemProblem(const Problem& p, int64_t unit, int64_t rows) : p_(p) {
    constexpr int64_t MAX_FLOATS = 1 << 17;
    const bool fits = p.keys * (padded(p.width) + padded(p.value_width)) <= MAX_FLOATS;
    if (rows <= LANES || !fits || !(is_half(p.key) || is_half(p.value))) return;
    wide_ = p;
    if (!pairs(p.key)) widen(wide_->key, p.unit(unit), p.width);
    if (!pairs(p.value) || !(TILES || p.grad)) widen(wide_->value, p.unit(unit), p.value_width);
  }

  const Problem& get() const { return wide_ ? *wide_ : p_; }

 private:
  static bool is_half(const View& view) { return view.type == Type::float16 || view.type == Type::bfloat16; }
  static bool pairs(const View& view) { return PAIRS && view.type == Type::bfloat16; }

  void widen(View& view, const Unit& unit, int64_t width) const {
    if (!is_half(view)) return;
    const int64_t offset = p_.offset_of(view, unit), size = padded(width);
    float* rows = item_arena.take(p_.keys * size);
    for (int64_t i = 0; i < p_.keys; ++i) stage_row(rows + i * size, view, offset + i * view.row, width, size);
    view = View();
    view.data = reinterpret_cast<char*>(rows);
    view.type = Type::float32;
    view.row = size;
    view.column = 1;
  }

  const Problem& p_;
  std::optional<Problem> wide_;
};

template <class Policy>
void forward_item(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const Span span = job.plan.item(index);
  const Problem& p = job.p;
  NextUnit next(p, span.unit + 1);
  next.add(p.key, p.keys, p.width);
  next.add(p.value, p.keys, p.value_width);
  next.add(p.query, p.queries, p.width);
  next.add(p.output, p.queries, p.value_width, true);
  next.add(p.tau, p.queries, 2, true);
  next.add(p.kept_weights, p.keys, padded(p.queries), true);
  const ItemScratch item;
  const TileScope tiles(p);
  const ItemProblem problem(p, span.unit, span.last - span.first);
  Finite finite;
  for (int64_t row = span.first; row < span.last;) {
    const BlockScratch scratch;
    Block block(problem.get(), span.unit, row, span.last - row);
    block.ahead = &next.ahead;
    forward_block<Policy>(block, finite);
    row += block.count;
  }
  next.ahead.finish();
  job.report(finite);
}

// Returns the number of threads to use: a call that takes a microsecond or two ends before a second thread wakes up.
INLINE int worth(const Problem& p, int threads) {
  const int64_t products = p.units() * p.heads() * p.queries * p.keys * (p.width + p.value_width);
  return products < (1 << 17) ? 1 : threads;
}

template <class Policy>
bool forward_all(const Problem& p, int threads) {
  Job job{p, Plan(p)};
  parallel(p.units() * job.plan.chunks, worth(p, threads), forward_item<Policy>, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
