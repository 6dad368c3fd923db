// Linear layers for inference:  out = x · weightᵀ + bias.
//
// float32, few rows: each weight is read once, in place; sums are vectorized along the depth.
//
// float32, up to PANEL_ROWS rows: the lanes of a vector are rows of x, which is transposed; weights are read in place
// and broadcast.
//
// float32, more rows: the lanes are columns of the output; weights are copied to panels, and x is read in place and
// broadcast. Copying the weights takes as long as multiplying them by about 10 rows.
//
// int8: each column of weightᵀ has its own scale, and each row of x is quantized here with its own scale, so a row's
// result does not depend on the other rows. Values of x become 16-bit integers with as many bits as fit: the sum of
// `depth` products with weights of up to 127 must stay below 2^31. Pairs of 16-bit products are summed in 32 bits
// (vpmaddwd or vpdpwssd), so nothing saturates, and only the weights lose precision noticeably.
//
// weight: blocks of 16 columns, [block][pair of the depth][column][2]; columns and depth are padded with zeros.
#pragma once

#include "arena.h"
#include "multiply.h"
#include "pack.h"

namespace regard {
namespace {

constexpr int COLUMNS = 16, VECTORS = COLUMNS / W;   // columns and vectors per block of weights
constexpr int ROWS = W * 3 / 4 > 3 ? W * 3 / 4 : 3;  // rows per tile: their sums fit into registers
constexpr int FLOAT_ROWS = 5;                        // rows per float32 tile
constexpr int PANEL = MAX_VECTORS * W;               // columns per panel of float32 weights
constexpr int64_t PANEL_ROWS = 192;                  // rows from which on float32 weights are copied to panels
constexpr int64_t MAX_DEPTH = 192;  // of one float32 sum; sums of parts are more accurate than one long sum
// minimum number of products that justifies a second thread; lower for float32 weights, which take longer to read
constexpr int64_t MIN_PRODUCTS = int64_t(1) << 21, MIN_FLOAT_PRODUCTS = int64_t(1) << 16;
constexpr float TINY = 1e-30f;  // rows whose values are all below this are treated as zero
typedef int16_t narrow __attribute__((vector_size(2 * W), aligned(2), may_alias));

// Computes R rows and C columns of a float32 product. The sums over the depth are reduced W at a time.
template <int R, int C>
INLINE void float_tile(const Linear& l, int64_t row, int64_t column) {
  constexpr int SUMS = R * C, ALL = (SUMS + W - 1) / W * W;
  const float *x = l.x + row * l.depth, *w = static_cast<const float*>(l.weight) + column * l.depth;
  vec sums[ALL] = {};
  int64_t i = 0;
  for (; i + W <= l.depth; i += W) {
    vec v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = load(x + r * l.depth + i);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vec y = load(w + c * l.depth + i);
      __builtin_prefetch(w + (c + 2 * C) * l.depth + i);  // rows are too short for the processor's own prefetching
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r * C + c] += v[r] * y;
    }
  }
  float totals[ALL];
#pragma GCC unroll 8
  for (int first = 0; first < ALL; first += W) {
    sum_each(sums + first);
    store(totals + first, sums[first]);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float total = totals[r * C + c];
      for (int64_t j = i; j < l.depth; ++j) total += x[r * l.depth + j] * w[c * l.depth + j];
      l.out[(row + r) * l.columns + column + c] = l.bias ? total + l.bias[column + c] : total;
    }
}

// Computes columns [column, end) of R rows, in groups of columns whose sums fill one vector.
template <int R>
INLINE void float_columns(const Linear& l, int64_t row, int64_t column, int64_t end) {
  constexpr int C = W / R > 1 ? W / R : 1;
  for (; column + C <= end; column += C) float_tile<R, C>(l, row, column);
  for (; column < end; ++column) float_tile<R, 1>(l, row, column);
}

template <int R>
INLINE void float_rows(const Linear& l, int64_t row, int64_t column, int64_t end) {
  if constexpr (R > 1) {
    if (l.rows - row < R) return float_rows<R - 1>(l, row, column, end);
  }
  float_columns<R>(l, row, column, end);
}

// Computes all rows at once, with one row per lane.
void linear_by_lanes(const Linear& l, int threads) {
  constexpr int64_t GROUP = 64;  // columns per item: their weights stay in the L2 cache
  struct Work {
    const Linear& l;
    const float* x;  // depth × lanes
    int lanes;
  };
  const ItemScratch scratch;
  Work work{l, nullptr, int(padded(l.rows))};
  float* columns = arena.take(l.depth * work.lanes);
  to_columns<false>(columns, work.lanes, int(l.rows), l.depth, 1, [&](int i) { return l.x + i * l.depth; });
  work.x = columns;
  const auto multiply_columns = [](void* context, int64_t item) {
    const Work& w = *static_cast<const Work*>(context);
    const Linear& l = w.l;
    const int64_t first = item * GROUP;
    const int size = int(l.columns - first < GROUP ? l.columns - first : GROUP);
    float* out = item_arena.take(GROUP * w.lanes);
    const float* weight = static_cast<const float*>(l.weight) + first * l.depth;
    for (int64_t t = 0; t < l.depth; t += MAX_DEPTH) {
      const int depth = int(l.depth - t < MAX_DEPTH ? l.depth - t : MAX_DEPTH);
      multiply<Walk::along>({weight + t, l.depth, w.x + t * w.lanes, w.lanes, out, w.lanes}, size, w.lanes / W, depth,
                            t > 0);
    }
    to_rows(out, w.lanes, int(l.rows), size, [&](int lane, int64_t t, vec y, int valid) {
      if (l.bias && valid == W) y += load(l.bias + first + t);
      if (l.bias && valid < W)
        for (int i = 0; i < valid; ++i) y[i] += l.bias[first + t + i];
      store_some(l.out + lane * l.columns + first + t, y, valid);
    });
    item_arena.finish();
  };
  parallel((l.columns + GROUP - 1) / GROUP, threads, multiply_columns, &work);
}

// Copies weights to a panel: panel[t][column] for `count` columns, starting at `column`, and `depth` values of t,
// starting at `start`. The rest of the panel is zero.
INLINE void copy_panel(const Linear& l, int64_t column, int count, int64_t start, int64_t depth, float* panel) {
  const float* weight = static_cast<const float*>(l.weight);
  if (!l.transposed) {
    weight += column * l.depth + start;
    to_columns<false>(panel, PANEL, count, depth, 1, [&](int i) { return weight + i * l.depth; });
    return;
  }
  weight += start * l.columns + column;
  for (int64_t t = 0; t < depth; ++t, weight += l.columns, panel += PANEL) {
    memcpy(panel, weight, size_t(count) * sizeof(float));
    for (int i = count; i < PANEL; ++i) panel[i] = 0;
  }
}

// Computes groups of columns from panels of the weights, which stay in the L2 cache.
void linear_by_panels(const Linear& l, int threads) {
  constexpr int64_t STRIP = 24;      // rows to multiply by all panels of an item: a multiple of the rows of a tile
  constexpr int64_t MIN_ROWS = 256;  // rows of an item: enough for copying the weights
  constexpr int64_t PANELS = 64 / PANEL > 1 ? 64 / PANEL : 1, GROUP = PANELS * PANEL;
  struct Work {
    const Linear& l;
    int64_t depth, groups, rows;  // depth of a panel, groups of columns, and rows of an item
  };
  const auto part = [](int64_t n, int64_t parts, int64_t multiple) {
    return (n + parts * multiple - 1) / (parts * multiple) * multiple;
  };
  const int64_t groups = (l.columns + GROUP - 1) / GROUP, max_blocks = (l.rows + MIN_ROWS - 1) / MIN_ROWS;
  // several items per thread, so that all threads finish at about the same time
  const int64_t wanted = threads > 1 ? (4 * threads + groups - 1) / groups : 1;
  const int64_t blocks = wanted < max_blocks ? wanted : max_blocks;  // of rows
  Work work{l, part(l.depth, (l.depth + MAX_DEPTH - 1) / MAX_DEPTH, W), groups, part(l.rows, blocks, STRIP)};
  const auto multiply_group = [](void* context, int64_t item) {
    const Work& w = *static_cast<const Work*>(context);
    const Linear& l = w.l;
    const int64_t begin = item % w.groups * GROUP, first = item / w.groups * w.rows;
    const int64_t end = l.columns - begin < GROUP ? l.columns : begin + GROUP;
    const int64_t stop = l.rows - first < w.rows ? l.rows : first + w.rows;
    float *panels = item_arena.take(w.depth * GROUP), *sums = item_arena.take(STRIP * PANEL);
    for (int64_t t = 0; t < l.depth; t += w.depth) {
      const int64_t depth = l.depth - t < w.depth ? l.depth - t : w.depth;
      const auto count = [&](int64_t column) { return int(end - column < PANEL ? end - column : PANEL); };
      const auto panel = [&](int64_t column) { return panels + (column - begin) * w.depth; };
      for (int64_t column = begin; column < end; column += PANEL)
        copy_panel(l, column, count(column), t, depth, panel(column));
      for (int64_t row = first; row < stop; row += STRIP)
        for (int64_t column = begin; column < end; column += PANEL) {
          const int rows = int(stop - row < STRIP ? stop - row : STRIP), columns = count(column);
          const bool whole = columns == PANEL, last = t + depth == l.depth;
          float* out = l.out + row * l.columns + column;
          multiply<Walk::along>(
              {l.x + row * l.depth + t, l.depth, panel(column), PANEL, whole ? out : sums, whole ? l.columns : PANEL},
              rows, (columns + W - 1) / W, int(depth), whole && t);
          for (int r = 0; r < rows && whole && last && l.bias; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL; v += W) {
              float* at = out + r * l.columns + v;
              store(at, load(at) + load(l.bias + column + v));
            }
          for (int r = 0; r < rows && !whole; ++r)
            for (int i = 0; i < columns; ++i) {
              float* at = out + r * l.columns + i;
              *at = (t ? *at : 0) + sums[r * PANEL + i] + (last && l.bias ? l.bias[column + i] : 0);
            }
        }
    }
    item_arena.finish();
  };
  const ItemScratch scratch;
  parallel(groups * ((l.rows + work.rows - 1) / work.rows), threads, multiply_group, &work);
}

// `transposed` weights need at least one row and one element of depth.
void linear(const Linear& l, int threads) {
  if (l.rows * l.depth * l.columns < MIN_FLOAT_PRODUCTS) threads = 1;
  if (l.transposed || (l.rows >= PANEL_ROWS && l.depth % W == 0 && l.depth)) return linear_by_panels(l, threads);
  if (l.rows > 8 && l.depth % W == 0 && l.depth) return linear_by_lanes(l, threads);
  constexpr int64_t GROUP = 48;  // columns per item: a multiple of W / R for up to 4 rows, and of 3 for 5 rows
  parallel((l.columns + GROUP - 1) / GROUP, threads,
           [](void* context, int64_t item) {
             const Linear& l = *static_cast<const Linear*>(context);
             const int64_t end = (item + 1) * GROUP < l.columns ? (item + 1) * GROUP : l.columns;
             for (int64_t row = 0; row < l.rows; row += FLOAT_ROWS) float_rows<FLOAT_ROWS>(l, row, item * GROUP, end);
           },
           const_cast<Linear*>(&l));
}

// Quantizes a row; returns its scale, which is NaN if the row is not finite.
INLINE float quantize_row(const float* x, int64_t depth, int16_t* to, float limit) {
  vec largest{}, zero{};
  int64_t i = 0;
  for (; i + W <= depth; i += W) {
    const vec v = load(x + i);
    largest = max(largest, max(v, -v));
    zero += v * 0.0f;
  }
  float top = 0, rest = sum(zero);
  for (int lane = 0; lane < W; ++lane) top = largest[lane] > top ? largest[lane] : top;
  for (int64_t j = i; j < depth; ++j) {
    const float size = x[j] < 0 ? -x[j] : x[j];
    top = size > top ? size : top;
    rest += x[j] * 0.0f;
  }
  const bool empty = !(top > TINY) || rest != 0;
  const float factor = empty ? 0 : limit / top;
  const vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  for (i = 0; i + W <= depth && !empty; i += W) {
    const ivec q = (ivec)(load(x + i) * factor + magic) - 0x4B400000;
    *reinterpret_cast<narrow*>(to + i) = __builtin_convertvector(q, narrow);
  }
  for (; i < depth; ++i) to[i] = empty ? int16_t(0) : int16_t(__builtin_lrintf(x[i] * factor));
  if (depth % 2) to[depth] = 0;
  return rest != 0 ? __builtin_nanf("") : empty ? 0 : top / limit;
}

// Computes B blocks of columns for R rows. x: pairs of quantized values. Not inlined: in a function with tiles of all
// sizes, GCC keeps the sums of some of them in memory.
template <int R, int B>
__attribute__((noinline)) void int8_tile(const Linear& l, const int32_t* x, const float* scales, int64_t row,
                                         int64_t block) {
  constexpr int N = B * VECTORS;
  const int64_t pairs = (l.depth + 1) / 2, step = pairs * 2 * COLUMNS;  // bytes from one block to the next
  const int8_t* w = static_cast<const int8_t*>(l.weight) + block * step;
  ivec sums[R][N] = {}, more[R][N] = {};
  const auto add = [&](ivec(&to)[R][N], int64_t p) __attribute__((always_inline)) {
    shorts wide[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) wide[v] = widen_bytes(w + v / VECTORS * step + v % VECTORS * 2 * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const shorts both = (shorts)(x[r * pairs + p] - ivec{});
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) to[r][v] = add_pairs(to[r][v], both, wide[v]);
    }
    w += 2 * COLUMNS;
  };
  int64_t p = 0;
  if constexpr (R * N <= 6) {  // few sums: two of each, because every addition waits for the one before
    for (; p + 2 <= pairs; p += 2) {
      add(sums, p);
      add(more, p + 1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sums[r][v] += more[r][v];
  }
  for (; p < pairs; ++p) add(sums, p);
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) {
    const int64_t first = (block + b) * COLUMNS, columns = l.columns - first < COLUMNS ? l.columns - first : COLUMNS;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      alignas(64) float y[COLUMNS];
      float* out = l.out + (row + r) * l.columns + first;
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const vec scale = scales[r] * load(l.scales + first + v * W);
        const vec result = __builtin_convertvector(sums[r][b * VECTORS + v], vec) * scale;
        store(columns == COLUMNS ? out + v * W : y + v * W, l.bias ? result + load(l.bias + first + v * W) : result);
      }
      if (columns < COLUMNS) memcpy(out, y, size_t(columns) * sizeof(float));
    }
  }
}

template <int R>
INLINE void int8_rows(const Linear& l, const int32_t* x, const float* scales, int64_t row, int64_t block) {
  const int64_t left = l.rows - row;
  if constexpr (R > 1) {
    if (left < R) return int8_rows<R - 1>(l, x, scales, row, block);
  }
  int8_tile<R, 1>(l, x, scales, row, block);
}

void linear_int8(const Linear& l, int threads) {
  constexpr int64_t BLOCKS = 4, QUANTIZED = 16;  // per item: blocks of columns to multiply, or rows to quantize
  constexpr bool PAIRED = VECTORS == 1;          // whether the sums of two blocks of columns fit into registers
  constexpr int64_t CHUNK = int64_t(128) << 10;  // bytes of x that stay in the L2 cache for all blocks of an item
  const ItemScratch scratch;
  struct Work {
    const Linear& l;
    int32_t* x;
    float* scales;
    float limit;
    int64_t pairs, blocks, chunk;
  };
  const int64_t pairs = (l.depth + 1) / 2, blocks = (l.columns + COLUMNS - 1) / COLUMNS;
  const int64_t largest = INT32_MAX / (127 * 2 * pairs);
  Work work{l,
            arena.take<int32_t>(l.rows * pairs),
            arena.take<float>(l.rows),
            float(largest < INT16_MAX ? largest : INT16_MAX),
            pairs,
            blocks,
            ROWS * (CHUNK / (int64_t(sizeof(int32_t)) * pairs * ROWS) + 1)};
  if (l.rows * l.depth * l.columns < MIN_PRODUCTS) threads = 1;
  const auto quantize = [](void* context, int64_t item) {
    const Work& w = *static_cast<const Work*>(context);
    const int64_t end = (item + 1) * QUANTIZED < w.l.rows ? (item + 1) * QUANTIZED : w.l.rows;
    for (int64_t row = item * QUANTIZED; row < end; ++row)
      w.scales[row] =
          quantize_row(w.l.x + row * w.l.depth, w.l.depth, reinterpret_cast<int16_t*>(w.x + row * w.pairs), w.limit);
  };
  parallel((l.rows + QUANTIZED - 1) / QUANTIZED, l.rows * l.depth < MIN_PRODUCTS / 16 ? 1 : threads, quantize, &work);
  const auto multiply = [](void* context, int64_t item) {
    const Work& w = *static_cast<const Work*>(context);
    const int64_t end = (item + 1) * BLOCKS < w.blocks ? (item + 1) * BLOCKS : w.blocks;
    for (int64_t first = 0; first < w.l.rows; first += w.chunk) {
      const int64_t stop = first + w.chunk < w.l.rows ? first + w.chunk : w.l.rows;
      int64_t block = item * BLOCKS, row;
      if constexpr (PAIRED)
        for (; stop - first >= ROWS && block + 2 <= end; block += 2) {
          for (row = first; row + ROWS <= stop; row += ROWS)
            int8_tile<ROWS, 2>(w.l, w.x + row * w.pairs, w.scales + row, row, block);
          for (int64_t i = block; i < block + 2 && row < stop; ++i)
            int8_rows<ROWS>(w.l, w.x + row * w.pairs, w.scales + row, row, i);
        }
      for (; block < end; ++block)
        for (row = first; row < stop; row += ROWS)
          int8_rows<ROWS>(w.l, w.x + row * w.pairs, w.scales + row, row, block);
    }
  };
  parallel((blocks + BLOCKS - 1) / BLOCKS, threads, multiply, &work);
}

}  // namespace
}  // namespace regard
