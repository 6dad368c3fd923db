// AVX-512 with AMX: tiles of 16 rows of 64 bytes, and products of tiles of bfloat16 pairs.
#pragma once

#include "avx512.h"

#define MULTIPLIES_TILES

namespace regard {
namespace {

// The operations of amx_product.h. Tiles are numbered by literals from 0 to 7; steps between rows are in floats. GCC
// assumes that loading a tile reads no memory; the empty asm makes it complete earlier stores first.
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, step)      \
  do {                                   \
    asm volatile("" : : : "memory");     \
    _tile_loadd(tile, from, 4 * (step)); \
  } while (false)
#define tile_store(tile, to, step) _tile_stored(tile, to, 4 * (step))
#define tile_dot(to, a, b) _tile_dpbf16ps(to, a, b)

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
alignas(64) constexpr TileConfig TILE_CONFIG;

// Sets the sizes of this thread's tiles. Without this, tile instructions are illegal.
INLINE void configure_tiles() { _tile_loadconfig(&TILE_CONFIG); }
INLINE void release_tiles() { _tile_release(); }

}  // namespace
}  // namespace regard
