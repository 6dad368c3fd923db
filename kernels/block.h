// A block of query rows that share their keys, one row in each lane, and the scores of its tiles:
//
//   scores[key][lane] = softcap(match(query, key)) + biases; −inf if the mask hides the key.
//
// The rows of a key head are numbered head · queries + query, over all its query heads, so a block can hold rows of
// several heads: one query for each of eight heads is a block of eight rows.
#pragma once

#include "activations.h"
#include "arena.h"
#include "dropout.h"
#include "multiply.h"
#include "abi.h"
#include "pack.h"
#include "amx_product.h"

namespace regard {
namespace {

constexpr int LANES = MAX_VECTORS * W;  // maximum number of rows in a block
constexpr int KEYS = 128;               // maximum number of keys in a tile
constexpr int MANY_FLOATS = 6 * KEYS;   // maximum number of float32 keys in a tile of few rows
constexpr int MANY = 16 * KEYS;         // maximum number of int8 or bfloat16 keys in a tile of few rows
// With few rows, the scores are vectorized over the width, because one row per lane would leave most lanes empty. Few
// means up to FEW rows or, if the full call has a single query (decoding), up to MAX_FEW query heads per key head.
constexpr int FEW = W == 4 ? 1 : 3, MAX_FEW = W / 2;
static_assert(FEW <= MAX_FEW && MAX_FEW <= W);

struct Term {
  bool dense;
  int32_t first, last;  // no row sees keys outside [first, last)
  int32_t from, to;     // every row sees keys [from, to), unless the mask is dense
};

struct Block {
  const Problem& p;
  Unit unit;
  int64_t first;  // first row of the block
  int count, vectors, lanes;
  int64_t low, high;  // range of the keys that any row sees
  bool few;           // the unit has few rows: see FEW
  bool in_step;       // the rows are consecutive rows of one head
  bool pairs;         // scores are products of bfloat16 pairs
  bool keeps;         // the backward pass reads the weights that the forward pass kept
  int64_t head[LANES], query[LANES], number[LANES];
  Term term[MAX_TERMS];
  alignas(64) int32_t start[MAX_TERMS][LANES], stop[MAX_TERMS][LANES];
  alignas(64) uint32_t hash[LANES], other[LANES];
  int64_t key_at, value_at, query_at;
  float *rows, *columns, *staged, *spare, *packed;
  float* vector = nullptr;  // vector of the additive score
  Ahead* ahead = nullptr;   // memory to prefetch during products
  const float* row_at[LANES];
  mutable bool overflowed = false;   // a row sees a key whose score is not finite
  mutable float* visible = nullptr;  // scratch memory for check_overflow

  // Creates a block of at most `rows_left` rows of a unit, starting at row `first`.
  Block(const Problem& problem, int64_t which, int64_t first, int64_t rows_left, bool backward = false)
      : p(problem), unit(problem.unit(which)), first(first) {
    const int64_t max_rows = until_break(rows_left);
    const int64_t needed = (max_rows + W - 1) / W, parts = (needed + MAX_VECTORS - 1) / MAX_VECTORS;
    vectors = int((needed + parts - 1) / parts);
    lanes = vectors * W;
    count = int(max_rows < lanes ? max_rows : lanes);
    few = p.heads() * p.queries <= (p.all_queries == 1 ? MAX_FEW : FEW) && p.family == Family::dot;
    pairs = PAIRS && !few && p.family == Family::dot && are_pairs(p, p.query, p.width) && are_pairs(p, p.key, p.width);
    head[0] = first / p.queries;
    query[0] = first % p.queries;
    for (int i = 1; i < lanes; ++i) {
      const bool on = i < count, next = on && query[i - 1] + 1 == p.queries;
      head[i] = head[i - 1] + next;
      query[i] = next ? 0 : query[i - 1] + on;
    }
    if (p.row)
      for (int i = 0; i < lanes; ++i) number[i] = integer(p.row, query[i] * p.row.row);
    in_step = !few && head[0] == head[lanes - 1];
    for (int i = 1; in_step && p.lines && i < count; ++i) in_step = number[i] == number[0] + i;
    key_at = p.offset_of(p.key, unit);
    value_at = p.offset_of(p.value, unit);
    query_at = p.offset_of(p.query, unit);
    set_mask();
    if (p.threshold) set_dropout();
    if (pairs)
      staged = TILES ? arena.take(pairs_buffer((p.width > p.value_width ? p.width : p.value_width) / 2)) : nullptr;
    else
      staged = stays(p.key, p.width, whole_keys()) ? nullptr : arena.take(tile_keys() * padded(p.width));
    spare = packed = nullptr;
    if (p.biases || p.terms) {
      spare = arena.take(lanes * (KEYS + W));
      packed = arena.take(2 * KEYS * lanes);
    }
    keeps = p.kept_weights && p.normalizer == Normalizer::softmax && p.family == Family::dot && p.softcap == 0 &&
            !p.threshold && p.heads() == 1 && !few && high - low <= KEYS;
    if (!keeps || !backward) set_query();
  }

  // The weights of the block, if `keeps`. The blocks of a unit are consecutive, each stored as [key][lane].
  float* kept_weights() const {
    return reinterpret_cast<float*>(p.kept_weights.data) + p.offset_of(p.kept_weights, unit) + first * p.keys;
  }

  int64_t tile_keys() const { return p.keys < KEYS ? p.keys : KEYS; }

  // Whether all rows belong to one head, so the distance between them is constant.
  bool one_head() const { return head[0] == head[lanes - 1]; }

  // Whether keys are read in whole vectors along their width.
  bool whole_keys() const { return few || p.family != Family::dot; }

  // Returns the number of rows before the next packed document, which has different keys.
  int64_t until_break(int64_t rows_left) const {
    if (p.terms != 1 || !p.start[0] || !p.stop[0] || !p.start[0].row || p.queries < 2) return rows_left;
    const int64_t start_at = p.offset_of(p.start[0], unit), stop_at = p.offset_of(p.stop[0], unit);
    int64_t seen = 0, h = first / p.queries, q = first % p.queries - 1;
    const int64_t max_rows = rows_left < LANES ? rows_left : LANES;
    for (int64_t i = 0; i < max_rows; ++i) {
      if (++q == p.queries) ++h, q = 0;
      const int64_t begin = integer(p.start[0], start_at + h * p.per_head(p.start[0]) + q * p.start[0].row);
      const int64_t end = integer(p.stop[0], stop_at + h * p.per_head(p.stop[0]) + q * p.stop[0].row);
      if (i && begin >= seen && end > begin) return i;
      if (end > seen) seen = end;
    }
    return rows_left;
  }

  int64_t at(const View& view, int64_t offset, int lane) const {
    return offset + head[lane] * p.per_head(view) + query[lane] * view.row;
  }

  void set_mask() {
    low = p.terms ? p.keys : 0;
    high = p.terms ? 0 : p.keys;
    for (int t = 0; t < p.terms; ++t) {
      Term& now = term[t];
      now = {bool(p.allowed[t]), int32_t(p.keys), 0, 0, int32_t(p.keys)};
      const int64_t start_at = p.offset_of(p.start[t], unit), stop_at = p.offset_of(p.stop[t], unit);
      for (int i = 0; i < lanes; ++i) {
        const int64_t begin = p.start[t] ? integer(p.start[t], at(p.start[t], start_at, i)) - p.first_key : 0;
        const int64_t end = p.stop[t] ? integer(p.stop[t], at(p.stop[t], stop_at, i)) - p.first_key : p.keys;
        const int32_t from = int32_t(begin < 0 ? 0 : begin > p.keys ? p.keys : begin);
        const int32_t to = int32_t(end < from ? from : end > p.keys ? p.keys : end);
        start[t][i] = from;
        stop[t][i] = to;
        if (from < to && from < now.first) now.first = from;
        if (from < to && to > now.last) now.last = to;
        if (from > now.from) now.from = from;
        if (to < now.to) now.to = to;
      }
      if (now.first < low) low = now.first;
      if (now.last > high) high = now.last;
    }
    if (high < low) high = low = 0;
  }

  void set_dropout() {
    const int64_t seed_at = p.offset_of(p.seed, unit), head_at = p.offset_of(p.head, unit);
    for (int i = 0; i < lanes; ++i) {
      const int64_t which = integer(p.head, head_at + head[i] * p.per_head(p.head));
      hash[i] = mix(uint32_t(which * p.all_queries + number[i]) ^ uint32_t(integer(p.seed, seed_at)));
      other[i] = mix(hash[i] + 0x9E3779B9u);
    }
  }

  // Stores the queries as columns of pairs.
  void set_query_pairs() {
    const int64_t words = p.width / 2, width = padded(words);
    rows = width == words ? nullptr : arena.take(count * width);
    for (int i = 0; i < count; ++i) {
      const char* from = p.query.data + 2 * at(p.query, query_at, i);
      row_at[i] = rows ? rows + i * width : reinterpret_cast<const float*>(from);
      if (!rows) continue;
      memcpy(rows + i * width, from, size_t(words) * 4);
      memset(rows + i * width + words, 0, size_t(width - words) * 4);
    }
    columns = arena.take((TILES ? width : words) * lanes);
    if (TILES) memset(columns + words * lanes, 0, size_t((width - words) * lanes) * sizeof(float));
    to_columns<false>(columns, lanes, lanes, words, 1,
                      [&](int lane) { return row_at[lane < count ? lane : count - 1]; });
  }

  // Stores the scaled queries: as rows for few rows and for additive scores, otherwise as columns.
  void set_query() {
    if (pairs) return set_query_pairs();
    const int64_t width = padded(p.width);
    const bool in_place = p.query.type == Type::float32 && p.query.column == 1 && p.width % W == 0;
    rows = nullptr;
    if (p.family != Family::dot) {
      const int64_t at = p.offset_of(p.vector, unit);
      vector = arena.take(width);
      for (int64_t t = 0; t < width; ++t)
        vector[t] = t < p.width ? regard::number(p.vector, at + t * p.vector.column) : 0;
    }
    if (!in_place || few || p.family != Family::dot) {
      rows = arena.take(count * width);
      for (int i = 0; i < count; ++i) stage_row(rows + i * width, p.query, at(p.query, query_at, i), p.width, width);
    }
    for (int i = 0; i < count; ++i)
      row_at[i] = rows ? rows + i * width : reinterpret_cast<const float*>(p.query.data) + at(p.query, query_at, i);
    if (few)
      for (int64_t i = 0; i < count * width; ++i) rows[i] *= p.scale;
    if (few || p.family != Family::dot) return;
    columns = arena.take(p.width * lanes);
    // unused lanes repeat the last row, so they hold no uninitialized values
    to_columns(columns, lanes, lanes, p.width, p.scale,
               [&](int lane) { return row_at[lane < count ? lane : count - 1]; });
  }

  // Whether no row sees any key in [from, to).
  bool hidden(int64_t from, int64_t to) const {
    for (int t = 0; t < p.terms; ++t)
      if (term[t].first < to && from < term[t].last) return false;
    return p.terms > 0;
  }

  // Whether the scores of keys [from, to) are plain products: no softcap, bias or mask.
  bool plain(int64_t from, int64_t to) const { return p.softcap == 0 && p.biases + p.lines == 0 && open(from, to); }

  // Whether every row sees all keys in [from, to).
  bool open(int64_t from, int64_t to) const {
    for (int t = 0; t < p.terms; ++t)
      if (!term[t].dense && term[t].from <= from && to <= term[t].to) return true;
    return p.terms == 0;
  }

  Rows keys_from(int64_t from, int count, bool whole) const {
    return stage(p.key, key_at, from, count, p.width, whole, staged);
  }

  // Computes the scores of `n` keys, starting at `from`. If there is a softcap, its derivative is written to `slopes`.
  void scores(int64_t from, int n, float* s, float* slopes = nullptr) const {
    if (few)
      for (int i = 0; i < n * lanes; i += W) store(s + i, vec{});
    plain_scores(from, n, s);
    if (!all_finite(s, n * lanes)) check_overflow(from, n, s);
    adjust(from, n, s, slopes);
  }

  // Computes scores without softcap, biases or mask, and does not check for overflow.
  void plain_scores(int64_t from, int n, float* s) const {
    match(pairs ? Rows{} : keys_from(from, n, whole_keys()), from, n, s);
    scale_keys(from, n, s);
  }

  // Products of large values overflow to +inf, −inf or NaN, depending on the order of summation, so such a score is
  // undefined if its key is visible. This is rare and need not be fast.
  void check_overflow(int64_t from, int n, const float* s) const {
    if (!visible) visible = arena.take(KEYS * lanes);
    for (int i = 0; i < n * lanes; i += W) store(visible + i, vec{});
    for (int b = 0; b < p.biases; ++b) add_bias(p.bias[b], from, n, visible);
    for (int l = 0; l < p.lines; ++l) add_line(p.line[l], from, n, visible);
    if (!open(from, from + n)) hide(from, n, visible);
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < count; ++i) overflowed |= !(s[j * lanes + i] * 0 == 0) && visible[j * lanes + i] != -INF;
  }

  // Computes the scores of n keys before softcap, biases and mask. Pairs are read in place, starting at key `from`.
  void match(Rows keys, int64_t from, int n, float* s) const {
    if (pairs) return match_pairs(from, n, s);
#define CASE(name, Activation) \
  case Family::name: return match_added<Activation>(keys, n, s);
    switch (p.family) {
      ACTIVATIONS(CASE)
      case Family::dot: break;
    }
#undef CASE
    if (few)
      match_few(keys, n, s, lanes, 1);
    else
      multiply<Walk::along>({keys.at, keys.step, columns, lanes, s, lanes, ahead}, n, vectors, int(p.width), false);
  }

  void match_pairs(int64_t from, int n, float* s) const {
    const auto* keys = reinterpret_cast<const float*>(p.key.data + 2 * (key_at + from * p.key.row));
    multiply_pairs({keys, ptrdiff_t(p.key.row / 2), columns, lanes, s, lanes, ahead, p.scale}, n, vectors,
                   int(p.width / 2), staged);
  }

  // Multiplies scores [key][lane] by the scales of int8 keys.
  void scale_keys(int64_t from, int n, float* s) const {
    if (p.key.type == Type::int8) scale_tile(p.key_scale, from, n, s);
  }

  // Multiplies weights [key][lane] by the scales of int8 values.
  void scale_values(int64_t from, int n, float* weights) const {
    if (p.value.type == Type::int8) scale_tile(p.value_scale, from, n, weights);
  }

  void scale_tile(const View& scale, int64_t from, int n, float* x) const {
    const int64_t at = p.offset_of(scale, unit) + from * scale.row;
    for (int j = 0; j < n; ++j) {
      const float factor = regard::number(scale, at + j * scale.row);
      for (int v = 0; v < lanes; v += W) store(x + j * lanes + v, load(x + j * lanes + v) * factor);
    }
  }

  // For few rows: vectorizes over the width, and reduces the sums of W keys together. The score of a key and a lane is
  // written to s[key · key_step + lane · lane_step].
  void match_few(Rows keys, int n, float* s, ptrdiff_t key_step, ptrdiff_t lane_step) const {
    const int64_t width = padded(p.width);
    for (int j = 0; j < n; j += W)
      for (int i = 0; i < count; ++i) {
        const float* q = rows + i * width;
        vec sums[W];
        // read keys in address order, because memory bandwidth is the bottleneck
        for (int k = 0; k < W; ++k) {
          const float* key = keys.at + (j + k) * keys.step;
          vec total{};
          for (int64_t t = 0; j + k < n && t < width; t += W) {
            __builtin_prefetch(key + t + 16 * keys.step);
            total += load(q + t) * load(key + t);
          }
          sums[k] = total;
        }
        spread(sums, j, n, s + i * lane_step, key_step);
      }
  }

  // Computes additive scores, Σ_t vector[t] · act(query[t] + key[t]), vectorized over the width.
  template <class Activation>
  void match_added(Rows keys, int n, float* s) const {
    const int64_t width = padded(p.width);
    for (int i = 0; i < lanes; ++i) {
      const float* q = rows + (i < count ? i : count - 1) * width;
      if (i >= count) {  // unused lanes repeat the last row
        for (int j = 0; j < n; ++j) s[j * lanes + i] = s[j * lanes + count - 1];
        continue;
      }
      for (int j = 0; j < n; j += W) {
        vec sums[W];
        for (int k = 0; k < W; ++k) {
          const float* key = keys.at + (j + k) * keys.step;
          vec total{};
          for (int64_t t = 0; j + k < n && t < width; t += W)
            total += load(vector + t) * Activation::of(load(q + t) + load(key + t));
          sums[k] = total;
        }
        spread(sums, j, n, s + i, lanes);
      }
    }
  }

  // Reduces W vectors, one per key starting at j, to the scores of one lane.
  INLINE static void spread(vec* sums, int j, int n, float* s, ptrdiff_t step) {
    sum_each(sums);
    float totals[W];
    store(totals, sums[0]);
    for (int k = 0; k < W && j + k < n; ++k) s[(j + k) * step] = totals[k];
  }

  void adjust(int64_t from, int n, float* s, float* slopes) const {
    if (p.softcap > 0) cap(n, s, slopes);
    for (int b = 0; b < p.biases; ++b) add_bias(p.bias[b], from, n, s);
    for (int l = 0; l < p.lines; ++l) add_line(p.line[l], from, n, s);
    if (!open(from, from + n)) hide(from, n, s);
  }

  void cap(int n, float* s, float* slopes) const {
    const float inverse = 1 / p.softcap;
    for (int i = 0; i < n * lanes; i += W) {
      vec slope;
      store(s + i, tanh(load(s + i) * inverse, slope) * p.softcap);
      if (slopes) store(slopes + i, slope);
    }
  }

  // Packs a tile [key][lane] of a tensor that varies along both rows and columns.
  void pack(const View& view, int64_t from, int n, float* to) const {
    const int64_t offset = p.offset_of(view, unit), stride = padded(n);
    for (int i = 0; i < count; ++i)
      stage_row(spare + i * stride, view, at(view, offset, i) + from * view.column, n, stride);
    to_columns(to, lanes, count, n, 1.0f, [&](int lane) { return spare + lane * stride; });
  }

  void add_bias(const View& view, int64_t from, int n, float* s) const {
    const int64_t offset = p.offset_of(view, unit);
    if (!view.column) {  // one value per row
      alignas(64) float own[LANES];
      for (int i = 0; i < lanes; ++i) own[i] = regard::number(view, at(view, offset, i));
      for (int j = 0; j < n; ++j)
        for (int v = 0; v < lanes; v += W) store(s + j * lanes + v, load(s + j * lanes + v) + load(own + v));
    } else if (!view.row && (!p.per_head(view) || head[0] == head[lanes - 1])) {  // one value per key
      for (int j = 0; j < n; ++j) {
        const float x = regard::number(view, at(view, offset, 0) + (from + j) * view.column);
        for (int v = 0; v < lanes; v += W) store(s + j * lanes + v, load(s + j * lanes + v) + x);
      }
    } else {
      pack(view, from, n, packed);
      for (int i = 0; i < n * lanes; i += W) store(s + i, load(s + i) + load(packed + i));
    }
  }

  // Adds a relative bias: entry (i, j) is the line's entry at distance j − i. For consecutive rows, the lanes of each
  // key are a reversed slice of the line, which shifts by one from key to key.
  void add_line(const View& view, int64_t from, int n, float* s) const {
    const int64_t offset = p.offset_of(view, unit), zero = p.first_key + from + p.all_queries - 1;
    if (!in_step) {
      for (int i = 0; i < count; ++i)
        for (int j = 0; j < n; ++j)
          s[j * lanes + i] +=
              regard::number(view, offset + head[i] * p.per_head(view) + (zero + j - number[i]) * view.column);
      return;
    }
    alignas(64) float stretch[KEYS + LANES];
    const int64_t at = offset + head[0] * p.per_head(view);
    for (int x = 0; x < n - 1 + lanes; ++x) {
      const int64_t distance = zero - number[0] + (n - 1) - x;
      stretch[x] = distance < 0 || x >= n - 1 + count ? 0 : regard::number(view, at + distance * view.column);
    }
    for (int j = 0; j < n; ++j)
      for (int v = 0; v < lanes; v += W)
        store(s + j * lanes + v, load(s + j * lanes + v) + load(stretch + n - 1 - j + v));
  }

  // Sets scores to −inf if no term of the mask allows the key.
  void hide(int64_t from, int n, float* s) const {
    if (p.terms == 1 && !term[0].dense) {
      for (int v = 0; v < lanes; v += W) {
        const ivec begin = load(start[0] + v), end = load(stop[0] + v);
        for (int j = 0; j < n; ++j) {
          const ivec key = ivec{} + int32_t(from + j);
          store(s + j * lanes + v, ((key >= begin) & (key < end)) ? load(s + j * lanes + v) : splat(-INF));
        }
      }
      return;
    }
    int32_t* seen = reinterpret_cast<int32_t*>(packed + KEYS * lanes);
    for (int i = 0; i < n * lanes; ++i) seen[i] = 0;
    for (int t = 0; t < p.terms; ++t) {
      if (term[t].dense) pack(p.allowed[t], from, n, packed);
      for (int j = 0; j < n; ++j)
        for (int v = 0; v < lanes; v += W) {
          const ivec key = ivec{} + int32_t(from + j);
          ivec now = (key >= load(start[t] + v)) & (key < load(stop[t] + v));
          if (term[t].dense) now &= load(packed + j * lanes + v) != 0.0f;
          auto* cell = reinterpret_cast<ivec*>(seen + j * lanes + v);
          *cell |= now;
        }
    }
    for (int i = 0; i < n * lanes; i += W) store(s + i, *reinterpret_cast<ivec*>(seen + i) ? load(s + i) : splat(-INF));
  }

  // Returns the dropout factors for a key's weights.
  vec keep(int64_t key, int v) const {
    const uvec row = load(hash + v), more = load(other + v);
    const uvec hashed = mix(mix((uvec{} + uint32_t(p.first_key + key)) ^ row) ^ more);
    return (hashed >= p.threshold) ? splat(p.kept) : vec{};
  }
};

}  // namespace
}  // namespace regard
