// The k most probable tokens of each row of logits, and their log probabilities:  x − max − log Σ exp(x − max).
//
// Tokens below `first` count toward the sum but are never selected. Blocks of logits whose maximum is too small are
// skipped. If two logits are equal, the token with the smaller index comes first. If a logit is NaN or +∞, all values
// of its row are NaN.
#pragma once

#include <cmath>

#include "vector.h"

namespace regard {
namespace {

constexpr int64_t TOKENS = 64;  // number of tokens per block

// Inserts a token into the sorted list of the k best tokens of its row.
INLINE void insert(float* values, int64_t* tokens, int64_t k, float value, int64_t token) {
  int64_t at = k - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    tokens[at] = tokens[at - 1];
  }
  values[at] = value;
  tokens[at] = token;
}

INLINE float block_maximum(const float* x, int64_t count) {
  vec top = splat(-INF);
  int64_t i = 0;
  for (; i + W <= count; i += W) top = max(top, load(x + i));
  float maximum = -INF;
  for (int lane = 0; lane < W; ++lane) maximum = top[lane] > maximum ? top[lane] : maximum;
  for (; i < count; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

// Returns Σ exp(x − top) over a block.
INLINE float sum_powers(const float* x, int64_t count, float top) {
  vec total{};
  int64_t i = 0;
  for (; i + W <= count; i += W) total += exp(load(x + i) - top);
  float rest = 0;
  for (; i < count; ++i) rest += exp(splat(x[i] - top))[0];
  return sum(total) + rest;
}

INLINE void best_of_row(const float* x, int64_t columns, int64_t first, int64_t k, float* values, int64_t* tokens) {
  for (int64_t i = 0; i < k; ++i) {
    values[i] = -INF;
    tokens[i] = first;
  }
  float top = first ? block_maximum(x, first) : -INF;
  for (int64_t start = first; start < columns; start += TOKENS) {
    const int64_t count = columns - start < TOKENS ? columns - start : TOKENS;
    const float maximum = block_maximum(x + start, count);
    top = maximum > top ? maximum : top;
    if (maximum > values[k - 1])
      for (int64_t i = start; i < start + count; ++i)
        if (x[i] > values[k - 1]) insert(values, tokens, k, x[i], i);
  }
  double total = 0;
  for (int64_t start = 0; start < columns; start += TOKENS)
    total += sum_powers(x + start, columns - start < TOKENS ? columns - start : TOKENS, top);
  const float log = float(std::log(total));
  for (int64_t i = 0; i < k; ++i) values[i] = values[i] - top - log;
}

void best(const Best& b, int threads) {
  constexpr int64_t ROWS_OF_ITEM = 4;
  parallel((b.rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM, b.rows * b.columns < (int64_t(1) << 15) ? 1 : threads,
           [](void* context, int64_t item) {
             const Best& b = *static_cast<const Best*>(context);
             const int64_t end = (item + 1) * ROWS_OF_ITEM < b.rows ? (item + 1) * ROWS_OF_ITEM : b.rows;
             for (int64_t row = item * ROWS_OF_ITEM; row < end; ++row)
               best_of_row(b.logits + row * b.columns, b.columns, b.first, b.k, b.values + row * b.k,
                           b.tokens + row * b.k);
           },
           const_cast<Best*>(&b));
}

}  // namespace
}  // namespace regard
