// Products of bfloat16 pairs:  C[r][v] = factor · Σ_t A(r, t) · B[t][v], as in multiply.h. Instruction sets with tiles
// (AMX) compute 16 × 16 elements of C from 16 rows of 16 pairs of A and 16 pairs of 16 columns of B at once. They also
// multiply float32 weights by bfloat16 values: a weight is split into a sum of bfloat16 numbers.
#pragma once

#include "multiply.h"
#include "pack.h"

namespace regard {
namespace {

#ifdef MULTIPLIES_TILES

constexpr bool TILES = true;
constexpr int SIDE = 16;  // rows of a tile; pairs in a row of A; columns of B and C
static_assert(W == SIDE);

// Three bfloat16 numbers hold the 24 bits of a float. With two, values that nearly cancel have twice the error.
constexpr int PARTS = 3;

// Configures this thread's tiles until the end of an item, even if it throws.
class TileScope {
 public:
  explicit TileScope(const Problem& p) : used_(p.key.type == Type::bfloat16 || p.value.type == Type::bfloat16) {
    if (used_) configure_tiles();
  }
  TileScope(const TileScope&) = delete;
  ~TileScope() {
    if (used_) release_tiles();
  }

 private:
  const bool used_;
};

// Multiplies 16 rows, or 32 if `tall`, by 16 columns, or 32 if `wide`. Step t reads 16 pairs of A,
// starting at 16 t, and 16 of B, starting at 16 (t / parts). sums: 32 × 32.
template <bool tall, bool wide>
void multiply_block(const Rows* a, const float* b, ptrdiff_t b_step, int steps, int parts, float* sums, Ahead* ahead) {
  tile_zero(0);
  if constexpr (wide) tile_zero(1);
  if constexpr (tall) tile_zero(2);
  if constexpr (tall && wide) tile_zero(3);
  for (int t = 0; t < steps; ++t) {
    const float* pairs = b + t / parts * SIDE * b_step;
    tile_load(4, a[0].at + t * SIDE, a[0].step);
    tile_load(6, pairs, b_step);
    tile_dot(0, 4, 6);
    if constexpr (wide) {
      tile_load(7, pairs + SIDE, b_step);
      tile_dot(1, 4, 7);
    }
    if constexpr (tall) {
      tile_load(5, a[1].at + t * SIDE, a[1].step);
      tile_dot(2, 5, 6);
    }
    if constexpr (tall && wide) tile_dot(3, 5, 7);
    if (ahead && !ahead->done()) ahead->step();
  }
  tile_store(0, sums, 2 * SIDE);
  if constexpr (wide) tile_store(1, sums + SIDE, 2 * SIDE);
  if constexpr (tall) tile_store(2, sums + SIDE * 2 * SIDE, 2 * SIDE);
  if constexpr (tall && wide) tile_store(3, sums + SIDE * 2 * SIDE + SIDE, 2 * SIDE);
}

// C (+)= factor · A · B. group(r) returns the rows r … r + 15 of A, whole and padded with zeros.
template <class Group>
INLINE void multiply_tiles(Group group, const Product& p, int rows, int vectors, int steps, int parts, bool add) {
  alignas(64) float sums[4 * SIDE * SIDE];
  for (int r = 0; r < rows; r += 2 * SIDE) {
    const int count = rows - r < 2 * SIDE ? rows - r : 2 * SIDE;
    const Rows a[2] = {group(r), count > SIDE ? group(r + SIDE) : Rows{}};
    for (int v = 0; v < vectors; v += 2) {
      const bool tall = count > SIDE, wide = vectors - v > 1;
      const auto block = tall   ? wide ? multiply_block<true, true> : multiply_block<true, false>
                         : wide ? multiply_block<false, true>
                                : multiply_block<false, false>;
      block(a, p.b + v * SIDE, p.b_step, steps, parts, sums, p.ahead);
      for (int i = 0; i < count; ++i)
        for (int x = 0; x < 1 + wide; ++x) {
          float* at = p.c + (r + i) * p.c_step + (v + x) * SIDE;
          const vec sum = load(sums + (2 * i + x) * SIDE) * p.factor;
          store(at, add ? load(at) + sum : sum);
        }
    }
  }
}

// The memory that multiply_pairs needs for a product of this depth.
INLINE int64_t pairs_buffer(int64_t depth) { return 2 * SIDE * padded(depth); }

// B has padded(depth) rows. Rows of A that do not fill a tile are copied to `buffer`.
inline void multiply_pairs(const Product& p, int rows, int vectors, int depth, float* buffer) {
  const int64_t width = padded(depth);
  const auto group = [&](int r) -> Rows {
    const float* from = p.a + r * p.a_step;
    if (rows - r >= SIDE && depth == width) return {from, p.a_step};
    float* to = buffer + r / SIDE % 2 * SIDE * width;
    memset(to, 0, size_t(SIDE * width) * sizeof(float));
    for (int i = 0; i < SIDE && r + i < rows; ++i)
      memcpy(to + i * width, from + i * p.a_step, size_t(depth) * sizeof(float));
    return {to, ptrdiff_t(width)};
  };
  multiply_tiles(group, p, rows, vectors, int(width / SIDE), 1, false);
}

// The number of steps of 16 pairs for n keys.
INLINE int64_t steps_of(int64_t n) { return (n + 2 * SIDE - 1) / (2 * SIDE); }

// The memory that multiply_weights needs for n keys.
INLINE int64_t weights_buffer(int64_t n, int64_t lanes, int64_t columns) {
  return steps_of(n) * SIDE * (PARTS * lanes + columns);
}

// Splits weights [key][lane] into rows [lane][step][part] of 16 pairs of keys.
INLINE void split_weights(const float* weights, int n, int lanes, float* rows) {
  const int64_t width = steps_of(n) * PARTS * SIDE;
  for (int v = 0; v < lanes; v += SIDE)
    for (int j = 0; j < n; j += 2 * SIDE) {
      vec pairs[PARTS][SIDE];
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; ++i) {
        const int key = j + 2 * i;
        vec x = key < n ? load(weights + key * lanes + v) : vec{};
        vec y = key + 1 < n ? load(weights + (key + 1) * lanes + v) : vec{};
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; ++part) {
          const uvec first = round_to_bfloat16(x), second = round_to_bfloat16(y);
          pairs[part][i] = (vec)(first >> 16 | second);
          x -= (vec)first;
          y -= (vec)second;
        }
      }
      for (int part = 0; part < PARTS; ++part) {
        transpose(pairs[part]);
        float* to = rows + v * width + j / 2 * PARTS + part * SIDE;
        for (int i = 0; i < SIDE; ++i) store(to + i * width, pairs[part][i]);
      }
    }
}

// C[lane] (+)= Σ_j weights[j][lane] · value_j. read(j, t): values t … t + 15 of key j, which are bfloat16, as floats.
template <class Read>
INLINE void multiply_weights(const float* weights, int lanes, Read read, float* c, ptrdiff_t c_step, int rows,
                             int vectors, int n, bool add, float* buffer, Ahead* ahead) {
  const int64_t steps = steps_of(n), width = steps * PARTS * SIDE, columns = vectors * SIDE;
  float *pairs = buffer, *split = buffer + steps * SIDE * columns;
  for (int64_t i = 0; i < steps * SIDE; ++i)
    for (int64_t t = 0; t < columns; t += SIDE) {
      const uvec first = 2 * i < n ? (uvec)read(2 * i, t) : uvec{};
      const uvec second = 2 * i + 1 < n ? (uvec)read(2 * i + 1, t) : uvec{};
      store(pairs + i * columns + t, (vec)(first >> 16 | second));
    }
  split_weights(weights, n, lanes, split);
  const auto group = [&](int r) -> Rows { return {split + r * width, ptrdiff_t(width)}; };
  multiply_tiles(group, {split, ptrdiff_t(width), pairs, ptrdiff_t(columns), c, c_step, ahead}, rows, vectors,
                 int(steps) * PARTS, PARTS, add);
}

// Multiplies two tiles of ones. Raises SIGILL if the system does not allow tiles.
inline bool try_tiles() {
  alignas(64) uint32_t ones[SIDE][SIDE];
  alignas(64) float sums[SIDE][SIDE];
  for (auto& row : ones)
    for (uint32_t& pair : row) pair = 0x3f803f80;
  configure_tiles();
  tile_zero(0);
  tile_load(4, reinterpret_cast<const float*>(ones), SIDE);
  tile_load(6, reinterpret_cast<const float*>(ones), SIDE);
  tile_dot(0, 4, 6);
  tile_dot(0, 4, 6);
  tile_store(0, sums[0], SIDE);
  release_tiles();
  bool right = true;
  for (const auto& row : sums)
    for (float sum : row) right &= sum == 4 * SIDE;
  return right;
}

#else

constexpr bool TILES = false;

struct TileScope {
  explicit TileScope(const Problem&) {}
};

INLINE int64_t pairs_buffer(int64_t) { return 0; }

INLINE void multiply_pairs(const Product& p, int rows, int vectors, int depth, float*) {
  multiply<Walk::along, Pair>(p, rows, vectors, depth, false);
}

INLINE int64_t weights_buffer(int64_t, int64_t, int64_t) { return 0; }

template <class Read>
INLINE void multiply_weights(const float*, int, Read, float*, ptrdiff_t, int, int, int, bool, float*, Ahead*) {}

constexpr bool (*try_tiles)() = nullptr;

#endif

}  // namespace
}  // namespace regard
