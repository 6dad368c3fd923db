// Activation functions for additive scores, vectorᵀ act(query + key): without the derivative for the forward pass, with
// the derivative for the backward pass.
//
// A new activation needs a policy here, an entry in abi.h, and an entry in ACTIVATIONS in scores.py.
#pragma once

#include "vector.h"

namespace regard {
namespace {

struct Tanh {
  INLINE static vec of(vec x) { return tanh(x); }
  INLINE static vec of(vec x, vec& slope) { return tanh(x, slope); }
};

struct Rectifier {
  INLINE static vec of(vec x) { return max(vec{}, x); }
  INLINE static vec of(vec x, vec& slope) {
    slope = x > 0.0f ? splat(1) : vec{};
    return max(vec{}, x);
  }
};

}  // namespace
}  // namespace regard
