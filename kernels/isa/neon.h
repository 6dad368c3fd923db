// NEON (AArch64): 4 floats per vector, 32 registers.
#pragma once

#include <cstring>

#include "../abi.h"

namespace regard {
namespace {

constexpr int W = 4, MAX_VECTORS = 4;
constexpr int tall(int V) { return V <= 2 ? 12 : V == 3 ? 8 : 6; }

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef int16_t shorts __attribute__((vector_size(4 * W)));

}  // namespace
}  // namespace regard

#include "portable.h"
