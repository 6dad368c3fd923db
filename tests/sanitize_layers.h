// Layers with random parameters for the drivers sanitize_decoding.cpp and sanitize_search.cpp, each also computed with
// plain loops in double.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "sanitize.h"

namespace {

using Numbers = std::vector<double>;

// A buffer that ends with its last element and may start at an odd address. Unwritten floats are NaN.
template <class T>
struct Buffer {
  std::vector<T> all;
  int64_t skip = 0;

  Buffer() = default;
  Buffer(Dice& dice, int64_t size) { make(dice, size); }
  void make(Dice& dice, int64_t size) {
    skip = dice.in(0, 1);
    all.resize(size_t(size + skip));
    if (!all.empty()) memset(static_cast<void*>(all.data()), 0xFF, all.size() * sizeof(T));
  }
  T* data() { return all.data() + skip; }
  int64_t size() const { return int64_t(all.size()) - skip; }
  T& operator[](int64_t i) { return all[size_t(i + skip)]; }
  bool operator==(const Buffer& other) const {
    return !memcmp(all.data(), other.all.data(), all.size() * sizeof(T));
  }
  template <class Number>
  Buffer& fill(Number number) {
    for (int64_t i = 0; i < size(); ++i) (*this)[i] = T(number());
    return *this;
  }
};

using Floats = Buffer<float>;

// A linear layer: float32, or int8 in the layout of linear.h.
struct Weights {
  static constexpr int64_t COLUMNS = 16;
  int64_t depth, columns, pairs = (depth + 1) / 2, padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS;
  bool int8, biased;
  Floats weight, scales, bias;
  Buffer<int8_t> packed;

  Weights(Dice& dice, int64_t depth, int64_t columns, bool int8)
      : depth(depth), columns(columns), int8(int8), biased(dice.chance(0.7)) {
    const double size = 1 / std::sqrt(double(depth));
    if (int8) {
      packed.make(dice, padded * pairs * 2);
      packed.fill([] { return 0; });
      scales.make(dice, padded);
      scales.fill([&] { return (0.5 + std::fabs(dice.normal())) * size / 127; });
      const bool extreme = dice.chance(0.3);  // the largest possible sums
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t i = 0; i < depth; ++i) packed[at(c, i)] = int8_t(extreme ? 127 : dice.in(-127, 127));
    } else {
      weight.make(dice, columns * depth);
      weight.fill([&] { return dice.normal() * size; });
    }
    if (!biased) return;
    bias.make(dice, int8 ? padded : columns);
    bias.fill([&] { return dice.normal(); });
  }

  int64_t at(int64_t column, int64_t i) const {
    return ((column / COLUMNS * pairs + i / 2) * COLUMNS + column % COLUMNS) * 2 + i % 2;
  }
  double get(int64_t column, int64_t i) {
    return int8 ? double(packed[at(column, i)]) * double(scales[column]) : double(weight[column * depth + i]);
  }
  regard::Step::Layer layer() {
    return {int8 ? static_cast<const void*>(packed.data()) : weight.data(), int8 ? scales.data() : nullptr,
            biased ? bias.data() : nullptr};
  }
  // x · weightᵀ + bias, for one row.
  Numbers apply(const Numbers& x) {
    Numbers found;
    for (int64_t c = 0; c < columns; ++c) {
      double sum = biased ? double(bias[c]) : 0;
      for (int64_t i = 0; i < depth; ++i) sum += x[size_t(i)] * get(c, i);
      found.push_back(sum);
    }
    return found;
  }
};

struct Judge {
  int64_t number;
  std::string what;
  bool bad = false;

  void expect(bool right, const char* name) {
    if (right || bad) return;
    printf("decoding, round %lld: %s\n  %s\n", (long long)number, name, what.c_str());
    bad = true;
  }
  void near(double found, double wanted, double within, const char* name) {
    if (bad || std::fabs(found - wanted) <= within || found == wanted) return;
    printf("decoding, round %lld: %s is %g and should be %g\n  %s\n", (long long)number, name, found, wanted,
           what.c_str());
    bad = true;
  }
  void say(const char* kernel, std::initializer_list<int64_t> sizes) {
    what = kernel;
    for (int64_t n : sizes) what += " " + std::to_string(n);
  }
};

// The parameters of a norm; its bias is optional.
struct Norm {
  Floats weight, bias;
  bool biased, exists = true;

  Norm(Dice& dice, int64_t width) : weight(dice, width), biased(dice.chance(0.7)) {
    weight.fill([&] { return 1 + 0.3 * dice.normal(); });
    if (biased) bias.make(dice, width), bias.fill([&] { return dice.normal(); });
  }
  regard::Step::Norm norm() {
    regard::Step::Norm found;
    found.weight = exists ? weight.data() : nullptr;
    found.bias = exists && biased ? bias.data() : nullptr;
    return found;
  }
  Numbers apply(const Numbers& x, double eps) {
    if (!exists) return x;
    double mean = 0, square = 0;
    for (double n : x) mean += n / double(x.size());
    for (double n : x) square += (n - mean) * (n - mean) / double(x.size());
    Numbers found;
    for (size_t i = 0; i < x.size(); ++i)
      found.push_back((x[i] - mean) / std::sqrt(square + eps) * double(weight[int64_t(i)]) +
                      (biased ? double(bias[int64_t(i)]) : 0));
    return found;
  }
};

}  // namespace
