// Normalizers:  weight = φ((score − top) − rest) · factor,  and its derivative with respect to the score.
//
// A policy declares how its row statistic τ = top + rest is computed:
//   online   together with the output, from a running maximum and a running sum
//   counted  from the number of visible keys
//   root     from all scores of the row, as the solution of Σ φ = 1
// and defines `weight` and `slope` for one vector of rows. A new normalizer needs a policy here and an entry in abi.h.
#pragma once

#include "abi.h"
#include "vector.h"

namespace regard {
namespace {

enum class Fit { online, counted, root };

// τ for one vector of rows, and a factor derived from the number of keys.
struct Statistic {
  vec top, rest, factor;
};

// exp(score / t) / Σ exp(score / t), computed as powers of 2 with exponents scaled by log₂e / t.
struct Softmax {
  static constexpr Fit fit = Fit::online;
  static constexpr bool sums_to_one = true;
  Power power;
  float sharpness;

  explicit Softmax(const Problem& p) : power(LOG2E * p.sharpness), sharpness(p.sharpness) {}
  Statistic read(vec top, vec rest, vec) const { return {top, rest, vec{}}; }
  INLINE vec weight(vec s, const Statistic& tau) const { return power((s - tau.top) - tau.rest); }
  INLINE vec slope(vec, vec weight, const Statistic&) const { return weight * sharpness; }
};

struct Sigmoid {
  static constexpr Fit fit = Fit::counted;
  static constexpr bool sums_to_one = false;

  explicit Sigmoid(const Problem&) {}
  Statistic read(vec top, vec rest, vec) const { return {top, rest, vec{}}; }
  INLINE vec weight(vec s, const Statistic& tau) const {
    return s == -INF ? vec{} : reciprocal(1.0f + exp(tau.rest - s));
  }
  INLINE vec slope(vec, vec weight, const Statistic&) const { return weight * (1.0f - weight); }
};

struct Relu {
  static constexpr Fit fit = Fit::counted;
  static constexpr bool sums_to_one = false;

  explicit Relu(const Problem&) {}
  Statistic read(vec top, vec rest, vec count) const { return {top, rest, 1.0f / count}; }
  INLINE vec weight(vec s, const Statistic& tau) const { return max(vec{}, s) * tau.factor; }
  INLINE vec slope(vec s, vec, const Statistic& tau) const { return s > 0.0f ? tau.factor : vec{}; }
};

struct Mean {
  static constexpr Fit fit = Fit::counted;
  static constexpr bool sums_to_one = false;

  explicit Mean(const Problem&) {}
  Statistic read(vec top, vec rest, vec count) const { return {top, rest, 1.0f / count}; }
  INLINE vec weight(vec s, const Statistic& tau) const { return s == -INF ? vec{} : s * tau.factor; }
  INLINE vec slope(vec s, vec, const Statistic& tau) const { return s == -INF ? vec{} : tau.factor; }
};

// max(x, 0), x = score − τ. Newton's method for Σ max(x, 0) = 1 converges from the left to the exact solution.
struct Sparsemax {
  static constexpr Fit fit = Fit::root;
  static constexpr bool sums_to_one = true;
  static constexpr float steepness = 1;

  explicit Sparsemax(const Problem&) {}
  Statistic read(vec top, vec rest, vec) const { return {top, rest, vec{}}; }
  INLINE vec weight(vec s, const Statistic& tau) const { return max(vec{}, (s - tau.top) - tau.rest); }
  INLINE vec slope(vec, vec weight, const Statistic&) const { return weight > 0.0f ? splat(1) : vec{}; }
  INLINE static void gather(vec gap, vec& values, vec& slopes) {
    values += max(vec{}, gap);
    slopes += gap > 0.0f ? splat(1) : vec{};
  }
  INLINE static vec step(vec values, vec slopes) { return (values - 1.0f) / slopes; }
  static float edge(float keys) { return -1 / keys; }  // upper bound on τ, reached if all scores are equal
};

// max(x / 2, 0)², x = score − τ. The norm of max(x / 2, 0) is convex in τ, so Newton's method does not overshoot.
struct Entmax15 {
  static constexpr Fit fit = Fit::root;
  static constexpr bool sums_to_one = true;
  static constexpr float steepness = 0.5f;

  explicit Entmax15(const Problem&) {}
  Statistic read(vec top, vec rest, vec) const { return {top, rest, vec{}}; }
  INLINE vec half(vec s, const Statistic& tau) const { return max(vec{}, ((s - tau.top) - tau.rest) * 0.5f); }
  INLINE vec weight(vec s, const Statistic& tau) const {
    const vec x = half(s, tau);
    return x * x;
  }
  INLINE vec slope(vec s, vec, const Statistic& tau) const { return half(s, tau); }
  INLINE static void gather(vec gap, vec& values, vec& slopes) {
    const vec x = max(vec{}, gap);
    values += x * x;
    slopes += x;
  }
  INLINE static vec step(vec values, vec slopes) {
    const vec norm = square_root(values);
    return (norm - 1.0f) * norm / slopes;
  }
  static float edge(float keys) { return -1 / __builtin_sqrtf(keys); }
};

}  // namespace
}  // namespace regard
