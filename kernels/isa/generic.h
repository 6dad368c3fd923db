// Any processor: 4 floats per vector, 16 registers.
#pragma once

#include <cstring>

#include "../abi.h"

namespace regard {
namespace {

constexpr int W = 4, MAX_VECTORS = 3;
constexpr int tall(int V) { return V == 1 ? 8 : V == 2 ? 6 : 4; }

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef int16_t shorts __attribute__((vector_size(4 * W)));

}  // namespace
}  // namespace regard

#include "portable.h"
