// Backward pass: with dP = dO · valueᵀ (after dropout), weights w and slopes g,
//
//   rows that sum to one   dS = g ∘ (dP − c),  c = Σ_j g dP / Σ_j g      (Σ g includes the sink)
//   other rows             dS = g ∘ dP
//   dQ = dS · key,  dK = dSᵀ · query,  dV = (w ∘ dropout)ᵀ · dO,  and dS itself for the biases.
//
// For softmax, c = dO · output, so one pass over the keys suffices. If the dS of a row are summed, as for biases, this
// would lose a digit of precision, so a first pass computes c as a sum over the keys. An item is a segment of the rows
// of one unit. No other item writes its part of dQ, and it adds to its own copy of dK and dV in a fixed order.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// A gradient shared by several rows, to which an item adds.
struct Sums {
  float* at = nullptr;
  int64_t row = 0;

  Sums() = default;
  Sums(const Problem& p, const View& view, const Unit& unit, int64_t segment)
      : at(view ? reinterpret_cast<float*>(view.data) + p.offset_of(view, unit) + segment * view.segment : nullptr),
        row(view.row) {}
};

struct Gradients {
  const Problem& p;
  Sums key, value, vector;
  int64_t segment;
  bool fresh;  // nothing has been added yet, and the next block writes every key

  Gradients(const Problem& p, const Unit& unit, int64_t segment)
      : p(p),
        key(p, p.d_key, unit, segment),
        value(p, p.d_value, unit, segment),
        vector(p, p.d_vector, unit, segment),
        segment(segment) {
    fresh = p.keys <= KEYS && p.terms == 0 && p.family == Family::dot && p.normalizer == Normalizer::softmax;
    if (!fresh) {
      clear(key, p.keys, padded(p.width));
      clear(value, p.keys, padded(p.value_width));
    }
    clear(vector, 1, padded(p.width));
  }

  void see(Finite& finite) const {
    see(key, p.keys, padded(p.width), finite);
    see(value, p.keys, padded(p.value_width), finite);
    see(vector, 1, padded(p.width), finite);
  }

  static void see(const Sums& sums, int64_t rows, int64_t width, Finite& finite) {
    if (sums.at && sums.row == width) return finite.see(sums.at, rows * width);
    for (int64_t i = 0; sums.at && i < rows; ++i) finite.see(sums.at + i * sums.row, width);
  }

  static void clear(const Sums& sums, int64_t rows, int64_t width) {
    for (int64_t i = 0; sums.at && i < rows; ++i) memset(sums.at + i * sums.row, 0, size_t(width) * sizeof(float));
  }
};

// Per-row data of a block for the backward pass: dO as rows and as columns, queries, dQ, τ and c.
struct BackwardRows {
  const Block& b;
  int64_t width, stride;  // value width, and padded value width
  Rows rows, queries{};   // dO, query
  bool pairs;             // dP is a product of bfloat16 pairs
  float* columns;         // dO: [t][lane], or columns of pairs
  // dQ; dot scores write to the gradient itself if they can, and `begun` is false until the first keys are added
  float* sums = nullptr;
  ptrdiff_t sums_step = 0;
  bool in_place = false, begun = false;
  Tau tau;
  PerLane c;

  // in_pairs: whether dP may be computed from pairs
  BackwardRows(const Block& b, bool in_pairs) : b(b), width(b.p.value_width), stride(padded(b.p.value_width)) {
    const Problem& p = b.p;
    const int64_t wide = padded(p.width);
    const int64_t grad_at = p.offset_of(p.grad, b.unit);
    rows = rows_of_block(p.grad, grad_at, width);
    pairs = in_pairs && are_pairs(p, p.grad, width) && are_pairs(p, p.value, width) && width / 2 % W == 0;
    columns = arena.take((pairs ? width / 2 : width) * b.lanes);
    if (pairs)
      to_columns<false>(columns, b.lanes, b.count, width / 2, 1.0f, [&](int lane) {
        return reinterpret_cast<const float*>(p.grad.data + 2 * b.at(p.grad, grad_at, lane));
      });
    else
      to_columns(columns, b.lanes, b.count, width, 1.0f, [&](int lane) { return rows.at + lane * rows.step; });
    if (p.d_key || p.family != Family::dot) queries = rows_of_block(p.query, b.query_at, p.width);
    if (p.d_query) {
      in_place = p.family == Family::dot && b.one_head() && stays(p.d_query, p.width, true);
      sums_step = in_place ? p.d_query.row : wide;
      sums = in_place ? first_of(p.d_query) : arena.take(b.count * wide);
      if (p.family != Family::dot) memset(sums, 0, size_t(b.count * wide) * sizeof(float)), begun = true;
    }
    read_tau(b, tau);
  }

  float* first_of(const View& view) const {
    return reinterpret_cast<float*>(view.data) + b.at(view, b.p.offset_of(view, b.unit), 0);
  }

  // Returns the block's rows of a tensor, in place if possible.
  Rows rows_of_block(const View& view, int64_t offset, int64_t width) const {
    if (b.one_head() && stays(view, width, true))
      return {reinterpret_cast<const float*>(view.data) + b.at(view, offset, 0), ptrdiff_t(view.row)};
    float* copy = arena.take(b.count * padded(width));
    for (int i = 0; i < b.count; ++i)
      stage_row(copy + i * padded(width), view, b.at(view, offset, i), width, padded(width));
    return {copy, ptrdiff_t(padded(width))};
  }

  // dQ (+)= dS · key
  void add_to_query(const float* ds, Rows keys, int n) {
    const int vectors = int(padded(b.p.width) / W);
    multiply<Walk::down>({ds, b.lanes, keys.at, keys.step, sums, sums_step, b.ahead}, b.count, vectors, n, begun);
    begun = true;
  }

  // c = Σ w dP / Σ w, where Σ w includes the sink.
  void divide(const PerLane& weights, const PerLane& products) {
    const int64_t offset = b.p.sink ? b.p.offset_of(b.p.sink, b.unit) : 0;
    for (int i = 0; i < b.lanes; ++i) {
      float total = weights.at[i];
      if (b.p.sink)
        total += exp(splat(number(b.p.sink, offset + b.head[i] * b.p.per_head(b.p.sink)) - tau.top.at[i]) -
                     tau.rest.at[i])[0];
      c.at[i] = i < b.count && total != 0 ? products.at[i] / total : 0;
    }
  }

  // c = dO · output
  void center() {
    const Problem& p = b.p;
    const int64_t offset = p.offset_of(p.output, b.unit);
    for (int i = 0; i < b.lanes; ++i) {
      c.at[i] = 0;
      if (i >= b.count) continue;
      const float* o = reinterpret_cast<const float*>(p.output.data) + b.at(p.output, offset, i);
      const float* d = rows.at + i * rows.step;
      vec total{};
      int64_t t = 0;
      for (; t + W <= width; t += W) total += load(o + t) * load(d + t);
      float rest = 0;
      for (; t < width; ++t) rest += o[t] * d[t];
      c.at[i] = sum(total) + rest;
    }
  }

  // Writes dQ, unless it was computed in place.
  void write(Finite& finite) const {
    const Problem& p = b.p;
    const int64_t offset = p.offset_of(p.d_query, b.unit), wide = padded(p.width);
    for (int i = 0; p.d_query && i < b.count; ++i) {
      float* row = sums + i * sums_step;
      if (!begun) memset(row, 0, size_t(wide) * sizeof(float));
      finite.see(row, wide);
      if (in_place) continue;
      float* to = reinterpret_cast<float*>(p.d_query.data) + b.at(p.d_query, offset, i);
      for (int64_t t = 0; t < wide; t += W) store_some(to + t, load(row + t), int(p.width - t < W ? p.width - t : W));
    }
  }

  // Writes the gradient of the sink, −g_sink · c, for each row.
  void write_sink() const {
    const Problem& p = b.p;
    const int64_t offset = p.offset_of(p.d_sink, b.unit), from = p.offset_of(p.sink, b.unit);
    for (int i = 0; p.d_sink && i < b.count; ++i) {
      const float score = number(p.sink, from + b.head[i] * p.per_head(p.sink));
      const vec weight = exp(splat(score - tau.top.at[i]) - tau.rest.at[i]);
      reinterpret_cast<float*>(p.d_sink.data)[b.at(p.d_sink, offset, i)] = -weight[0] * c.at[i];
    }
  }
};

// Gradients of the biases: dS, summed over the axes along which a bias is shared.
inline void add_to_biases(const Block& b, const Gradients& g, int64_t from, int n, const float* ds) {
  const Problem& p = b.p;
  for (int k = 0; k < p.biases; ++k) {
    const View& view = p.d_bias[k];
    if (!view) continue;
    const int64_t offset = p.offset_of(view, b.unit);
    float* base = reinterpret_cast<float*>(view.data) + offset + g.segment * view.segment;
    if (!view.column) {  // one value per row: (…, q, 1)
      for (int i = 0; i < b.count; ++i) {
        float total = 0;
        for (int j = 0; j < n; ++j) total += ds[j * b.lanes + i];
        base[b.head[i] * p.per_head(view) + b.query[i] * view.row] += total;
      }
    } else if (!view.row) {  // one value per key: (…, 1, k)
      for (int j = 0; j < n; ++j)
        for (int i = 0; i < b.count; ++i)
          base[b.head[i] * p.per_head(view) + (from + j) * view.column] += ds[j * b.lanes + i];
    } else {
      to_rows(ds, b.lanes, b.count, n, [&](int lane, int64_t j, vec x, int count) {
        float* to = base + b.head[lane] * p.per_head(view) + b.query[lane] * view.row + (from + j) * view.column;
        if (count == W && view.column == 1)
          store(to, load(to) + x);
        else
          for (int i = 0; i < count; ++i) to[i * view.column] += x[i];
      });
    }
  }
  for (int k = 0; k < p.lines; ++k) {
    const View& view = p.d_line[k];
    if (!view) continue;
    float* base = reinterpret_cast<float*>(view.data) + p.offset_of(view, b.unit) + g.segment * view.segment;
    const int64_t zero = p.first_key + from + p.all_queries - 1;
    if (!b.in_step) {
      for (int j = 0; j < n; ++j)
        for (int i = 0; i < b.count; ++i)
          base[b.head[i] * p.per_head(view) + (zero + j - b.number[i]) * view.column] += ds[j * b.lanes + i];
      continue;
    }
    // the lanes of each key are a reversed slice of the line (see add_line)
    alignas(64) float stretch[KEYS + LANES] = {};
    for (int j = 0; j < n; ++j)
      for (int v = 0; v < b.lanes; v += W) {
        float* at = stretch + n - 1 - j + v;
        store(at, load(at) + load(ds + j * b.lanes + v));
      }
    float* to = base + b.head[0] * p.per_head(view);
    for (int x = 0; x < n - 1 + b.count; ++x) to[(zero - b.number[0] + n - 1 - x) * view.column] += stretch[x];
  }
}

// Additive scores, h = act(query + key): adds dS · act′ · vector to the gradients of query and key, and dS · h to the
// gradient of vector.
template <class Activation>
void add_to_added(BackwardRows& a, const Gradients& g, Rows keys, int64_t from, int n, const float* ds) {
  const Block& b = a.b;
  const int64_t wide = padded(b.p.width);
  for (int64_t t = 0; t < wide; t += W) {
    const vec v = load(b.vector + t);
    vec of_vector{};
    for (int i = 0; i < b.count; ++i) {
      const vec q = load(a.queries.at + i * a.queries.step + t);
      vec of_query{}, of_row{};
      for (int j = 0; j < n; ++j) {
        const float d = ds[j * b.lanes + i];
        vec inner;
        const vec h = Activation::of(q + load(keys.at + j * keys.step + t), inner);
        inner = inner * d;
        of_row += h * d;
        of_query += inner;
        if (g.key.at) {
          float* to = g.key.at + (from + j) * g.key.row + t;
          store(to, load(to) + inner * v);
        }
      }
      of_vector += of_row;
      if (a.sums) store(a.sums + i * a.sums_step + t, load(a.sums + i * a.sums_step + t) + of_query * v);
    }
    if (g.vector.at) store(g.vector.at + t, load(g.vector.at + t) + of_vector);
  }
}

// Adds the gradients of query, key and the additive score's vector. For dot scores, dS includes the factor `scale`.
inline void add_to_inputs(BackwardRows& a, const Gradients& g, Rows keys, int64_t from, int n, const float* ds) {
  const Block& b = a.b;
  const Problem& p = b.p;
  const ptrdiff_t wide = padded(p.width);
#define CASE(name, Activation) \
  case Family::name: return add_to_added<Activation>(a, g, keys, from, n, ds);
  switch (p.family) {
    ACTIVATIONS(CASE)
    case Family::dot: break;
  }
#undef CASE
  if (a.sums) a.add_to_query(ds, keys, n);
  if (g.key.at)
    multiply<Walk::along>(
        {ds, b.lanes, a.queries.at, a.queries.step, g.key.at + from * g.key.row, ptrdiff_t(g.key.row), b.ahead}, n,
        int(wide / W), b.count, !g.fresh);
}

// A tile of scores and, if anything other than value needs a gradient, a tile of dP.
template <class Policy>
struct Tiles {
  const Block& b;
  const Policy policy;
  BackwardRows& a;
  bool scores_too, capped;
  float *s, *dp, *slopes, *buffer, *whole;
  Rows keys{};

  Tiles(const Block& b, BackwardRows& a) : b(b), policy(b.p), a(a), capped(b.p.softcap > 0) {
    const Problem& p = b.p;
    scores_too = p.d_query || p.d_key || p.adds_up();
    s = b.keeps ? b.kept_weights() : arena.take(KEYS * b.lanes);
    dp = arena.take(KEYS * b.lanes);
    slopes = capped ? arena.take(KEYS * b.lanes) : nullptr;
    buffer = a.pairs || stays(p.value, a.width, false) ? nullptr : arena.take(b.tile_keys() * a.stride);
    whole = stays(p.key, p.width, true) ? nullptr : arena.take(b.tile_keys() * padded(p.width));
  }

  void fill(int64_t from, int n) {
    const Problem& p = b.p;
    keys = stage(p.key, b.key_at, from, n, p.width, true, whole);
    if (!b.keeps) {
      if (b.few)
        for (int i = 0; i < n * b.lanes; i += W) store(s + i, vec{});
      b.match(keys, from, n, s);
      b.scale_keys(from, n, s);
      b.adjust(from, n, s, slopes);
    }
    if (!scores_too) return;
    if (a.pairs) {
      const auto* pairs = reinterpret_cast<const float*>(p.value.data + 2 * (b.value_at + from * p.value.row));
      return multiply_pairs({pairs, ptrdiff_t(p.value.row / 2), a.columns, b.lanes, dp, b.lanes, b.ahead}, n, b.vectors,
                            int(a.width / 2), b.staged);
    }
    const Rows values = stage(p.value, b.value_at, from, n, a.width, false, buffer);
    multiply<Walk::along>({values.at, values.step, a.columns, b.lanes, dp, b.lanes, b.ahead}, n, b.vectors,
                          int(a.width), false);
  }

  INLINE Statistic row(int v) const { return read_row(policy, a.tau, v); }

  // Adds the tile's Σ w and Σ w dP to `weights` and `products`. If `keep` is set, the weights replace the scores. If
  // `kept` is set, the scores have already been replaced.
  template <bool kept>
  void add_up(int64_t from, int n, bool keep, PerLane& weights, PerLane& products) const {
    for (int v = 0; v < b.lanes; v += W) {
      const Statistic tau = row(v);
      vec all{}, every{};
      for (int j = 0; j < n;) {  // partial sums, for precision: an error in c affects every dS in the row
        const int end = j + 8 < n ? j + 8 : n;
        vec total{}, product{};
        for (; j < end; ++j) {
          const vec score = load(s + j * b.lanes + v), weight = kept ? score : policy.weight(score, tau);
          const vec d = load(dp + j * b.lanes + v);
          if (keep && !kept) store(s + j * b.lanes + v, weight);
          total += weight;
          product += weight * (b.p.threshold ? d * b.keep(from + j, v) : d);
        }
        all += total;
        every += product;
      }
      weights.set(v, weights.get(v) + all);
      products.set(v, products.get(v) + every);
    }
  }

  // Turns scores, or kept weights, into weights after dropout, and dP into dS · factor.
  template <bool kept_weights>
  void differentiate(int64_t from, int n, float factor) const {
    for (int v = 0; v < b.lanes; v += W) {
      const Statistic tau = row(v);
      const vec c = Policy::sums_to_one ? a.c.get(v) : vec{};
      for (int j = 0; j < n; ++j) {
        const int64_t at = j * b.lanes + v;
        const vec score = load(s + at), weight = kept_weights ? score : policy.weight(score, tau);
        const vec kept = b.p.threshold ? b.keep(from + j, v) : splat(1);
        if (!kept_weights || b.p.threshold) store(s + at, weight * kept);
        if (scores_too) store(dp + at, policy.slope(score, weight, tau) * factor * (load(dp + at) * kept - c));
      }
    }
  }
};

template <class Policy>
void backward_block(const Block& b, Gradients& g, Finite& finite) {
  const Problem& p = b.p;
  BackwardRows a(b, b.pairs);
  Tiles<Policy> tiles(b, a);
  see_tau(b, a.tau, finite);
  if constexpr (Policy::fit == Fit::counted) count_keys(b, tiles.s, a.tau.count);
  Tally tally(b);
  const bool single_tile = b.high - b.low <= KEYS;
  // dQ and dK of dot scores include the factor `scale`; dS itself, which biases need, does not
  const float scale = p.family == Family::dot ? p.scale : 1, factor = p.adds_up() ? 1 : scale;
  const bool exact = Policy::sums_to_one && tiles.scores_too && (single_tile || p.adds_up());
  if (Policy::sums_to_one && tiles.scores_too && !exact) a.center();
  if (exact) {
    PerLane weights, products;
    for (int v = 0; v < b.lanes; v += W) weights.set(v, vec{}), products.set(v, vec{});
    for (int64_t from = b.low; from < b.high; from += KEYS) {
      const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
      if (b.hidden(from, from + n)) continue;
      tiles.fill(from, n);
      if (b.keeps)
        tiles.template add_up<true>(from, n, true, weights, products);
      else
        tiles.template add_up<false>(from, n, single_tile, weights, products);
    }
    a.divide(weights, products);
  }
  for (int64_t from = b.low; from < b.high; from += KEYS) {
    const int n = int(b.high - from < KEYS ? b.high - from : KEYS);
    if (b.hidden(from, from + n)) continue;
    if (exact && single_tile) {  // the tile already holds weights, from which the slopes of softmax follow
      tiles.template differentiate<true>(from, n, factor);
    } else if (b.keeps) {  // only the gradient of value is needed
      tiles.fill(from, n);
    } else {
      tiles.fill(from, n);
      if (Policy::fit == Fit::counted) tally.add(b, n, tiles.s);
      tiles.template differentiate<false>(from, n, factor);
    }
    if (g.value.at)
      multiply<Walk::along>(
          {tiles.s, b.lanes, a.rows.at, a.rows.step, g.value.at + from * g.value.row, ptrdiff_t(g.value.row), b.ahead},
          n, int(a.stride / W), b.count, !g.fresh);
    if (!tiles.scores_too) continue;
    if (p.adds_up())
      for (int i = 0; i < n * b.lanes; i += W) finite.see(load(tiles.dp + i));
    add_to_biases(b, g, from, n, tiles.dp);
    if (p.adds_up())
      for (int i = 0; i < n * b.lanes; i += W) store(tiles.dp + i, load(tiles.dp + i) * scale);
    if (tiles.capped)
      for (int i = 0; i < n * b.lanes; i += W) store(tiles.dp + i, load(tiles.dp + i) * load(tiles.slopes + i));
    add_to_inputs(a, g, tiles.keys, from, n, tiles.dp);
  }
  if (Policy::fit == Fit::counted && !tally.agrees(b, a.tau.count)) finite.fail();
  if constexpr (Policy::sums_to_one) a.write_sink();
  a.write(finite);
  g.fresh = false;
}

// Sparse rows: τ determines which keys have a nonzero weight in some row of the block; all others are skipped.
template <class Policy>
void backward_sparse(const Block& b, const Gradients& g, Finite& finite) {
  const Problem& p = b.p;
  const Policy policy(p);
  BackwardRows a(b, false);
  const int64_t keys = b.high - b.low, wide = padded(p.width);
  const bool capped = p.softcap > 0;
  see_tau(b, a.tau, finite);
  float *scores = arena.take(keys * b.lanes), *slopes = capped ? arena.take(keys * b.lanes) : nullptr;
  int64_t* support = arena.take<int64_t>(keys);
  all_scores(b, scores, slopes);
  const int64_t support_size = find_support(b, scores, a.tau, support);
  const int64_t max_keys = support_size < KEYS ? support_size : KEYS;
  float *dp = arena.take(support_size * b.lanes), *w = arena.take(max_keys * b.lanes);
  float* buffer = arena.take(max_keys * a.stride);
  float *own_keys = arena.take(max_keys * wide), *rows = arena.take(max_keys * (wide > a.stride ? wide : a.stride));
  PerLane total;
  for (int v = 0; v < b.lanes; v += W) total.set(v, vec{}), a.c.set(v, vec{});

  for (int64_t at = 0; at < support_size; at += KEYS) {  // dP and c
    const int n = int(support_size - at < KEYS ? support_size - at : KEYS);
    for (int i = 0; i < n; ++i)
      stage_row(buffer + i * a.stride, p.value, b.value_at + (b.low + support[at + i]) * p.value.row, a.width,
                a.stride);
    float* tile = dp + at * b.lanes;
    multiply<Walk::along>({buffer, ptrdiff_t(a.stride), a.columns, b.lanes, tile, b.lanes}, n, b.vectors, int(a.width),
                          false);
    for (int v = 0; v < b.lanes; v += W) {
      const Statistic row = read_row(policy, a.tau, v);
      vec c{}, all{};
      for (int i = 0; i < n; ++i) {
        const int64_t j = support[at + i];
        const vec score = load(scores + j * b.lanes + v), slope = policy.slope(score, policy.weight(score, row), row);
        vec d = load(tile + i * b.lanes + v);
        if (p.threshold) d *= b.keep(b.low + j, v);
        store(tile + i * b.lanes + v, d);
        c += slope * d;
        all += slope;
      }
      a.c.set(v, a.c.get(v) + c);
      total.set(v, total.get(v) + all);
    }
  }
  for (int v = 0; v < b.lanes; v += W) a.c.set(v, a.c.get(v) / (total.get(v) == 0.0f ? splat(1) : total.get(v)));

  for (int64_t at = 0; at < support_size; at += KEYS) {
    const int n = int(support_size - at < KEYS ? support_size - at : KEYS);
    float* tile = dp + at * b.lanes;
    for (int i = 0; i < n; ++i) {
      const int64_t j = support[at + i];
      stage_row(own_keys + i * wide, p.key, b.key_at + (b.low + j) * p.key.row, p.width, wide);
      for (int v = 0; v < b.lanes; v += W) {
        const Statistic row = read_row(policy, a.tau, v);
        const vec score = load(scores + j * b.lanes + v), weight = policy.weight(score, row);
        store(w + i * b.lanes + v, p.threshold ? weight * b.keep(b.low + j, v) : weight);
        store(tile + i * b.lanes + v, policy.slope(score, weight, row) * (load(tile + i * b.lanes + v) - a.c.get(v)));
      }
    }
    if (g.value.at) {
      multiply<Walk::along>({w, b.lanes, a.rows.at, a.rows.step, rows, ptrdiff_t(a.stride)}, n, int(a.stride / W),
                            b.count, false);
      for (int i = 0; i < n; ++i)
        for (int64_t t = 0; t < a.stride; t += W) {
          float* to = g.value.at + (b.low + support[at + i]) * g.value.row + t;
          store(to, load(to) + load(rows + i * a.stride + t));
        }
    }
    if (p.adds_up())
      for (int i = 0; i < n * b.lanes; i += W) finite.see(load(tile + i));
    for (int i = 0; i < n; ++i) add_to_biases(b, g, b.low + support[at + i], 1, tile + i * b.lanes);
    if (capped)
      for (int i = 0; i < n; ++i)
        for (int v = 0; v < b.lanes; v += W) {
          float* to = tile + i * b.lanes + v;
          store(to, load(to) * load(slopes + support[at + i] * b.lanes + v));
        }
    if (p.family == Family::dot) {
      for (int i = 0; i < n * b.lanes; i += W) store(tile + i, load(tile + i) * p.scale);
      if (a.sums) a.add_to_query(tile, {own_keys, ptrdiff_t(wide)}, n);
      if (g.key.at) {
        multiply<Walk::along>({tile, b.lanes, a.queries.at, a.queries.step, rows, ptrdiff_t(wide)}, n, int(wide / W),
                              b.count, false);
        for (int i = 0; i < n; ++i)
          for (int64_t t = 0; t < wide; t += W) {
            float* to = g.key.at + (b.low + support[at + i]) * g.key.row + t;
            store(to, load(to) + load(rows + i * wide + t));
          }
      }
    } else {
      for (int i = 0; i < n; ++i)
        add_to_inputs(a, g, {own_keys + i * wide, ptrdiff_t(wide)}, b.low + support[at + i], 1, tile + i * b.lanes);
    }
  }
  a.write(finite);
}

template <class Policy>
void backward_item(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const Problem& p = job.p;
  // last segments first: with a causal mask, they are the longest
  const int64_t unit = index % p.units(), segment = p.segments - 1 - index / p.units();
  const int64_t heads = p.heads();
  const bool per_head = p.queries >= 2 * LANES;
  const ItemScratch item;
  const TileScope tiles(p);
  const ItemProblem problem(p, unit, heads * p.queries / p.segments);
  Finite finite;
  Gradients gradients(p, p.unit(unit), segment);
  NextUnit next(p, p.segments == 1 ? unit + 1 : p.units());
  next.add(p.key, p.keys, p.width);
  next.add(p.query, p.queries, p.width);
  next.add(p.grad, p.queries, p.value_width);
  next.add(p.value, p.keys, p.value_width);
  next.add(p.kept_weights, p.keys, padded(p.queries));
  next.add(p.d_value, p.keys, p.value_width, true);
  next.add(p.d_query, p.queries, p.width, true);
  next.add(p.d_key, p.keys, p.width, true);
  for (int64_t head = 0; head < (per_head ? heads : 1); ++head) {
    const int64_t rows = per_head ? p.queries : heads * p.queries;
    const int64_t first = head * rows + rows * segment / p.segments,
                  last = head * rows + rows * (segment + 1) / p.segments;
    for (int64_t row = first; row < last;) {
      const BlockScratch scratch;
      Block block(problem.get(), unit, row, last - row, true);
      block.ahead = &next.ahead;
      if constexpr (Policy::fit == Fit::root)
        backward_sparse<Policy>(block, gradients, finite);
      else
        backward_block<Policy>(block, gradients, finite);
      row += block.count;
    }
  }
  next.ahead.finish();
  gradients.see(finite);
  job.report(finite);
}

template <class Policy>
bool backward_all(const Problem& p, int threads) {
  Job job{p, Plan(p)};
  parallel(p.units() * p.segments, threads, backward_item<Policy>, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
