// A call as the kernels see it: sizes, numbers, and views of tensors whose axes are all laid out alike,
// (batch…, g, r, row, column), with stride 0 where a tensor is the same for all. See problem.py.
#pragma once

#include <cstddef>
#include <cstdint>

// Never a function of its own, of which the linker might keep the copy for another instruction set.
#define INLINE inline __attribute__((always_inline))

namespace regard {

constexpr int MAX_LEAD = 10, MAX_TERMS = 4, MAX_BIASES = 4, MAX_LINES = 2;

enum class Type : int64_t { none, float32, bfloat16, float16, int64, boolean };
enum class Family : int64_t { dot, tanh, relu };
enum class Normalizer : int64_t { softmax, sigmoid, relu, mean, sparsemax, entmax15 };

struct View {
  char* data = nullptr;
  Type type = Type::none;
  int64_t lead[MAX_LEAD] = {};  // strides, in elements
  int64_t row = 0, column = 0;
  int64_t segment = 0;  // of gradients that several segments of rows add to

  INLINE explicit operator bool() const { return data != nullptr; }
};

// What shares keys: an index along each batch axis, and a key head.
struct Unit {
  int64_t at[MAX_LEAD];
};

struct Problem {
  int axes = 0;  // batch axes, key heads g, query heads r per key head
  int64_t lead[MAX_LEAD] = {};
  int64_t queries = 0, keys = 0, width = 0, value_width = 0;
  int64_t all_queries = 0, first_key = 0;  // of the whole call, if this is a part of it
  Family family = Family::dot;
  Normalizer normalizer = Normalizer::softmax;
  float scale = 1, sharpness = 1, softcap = 0, offset = 0;  // softmax's 1 / temperature, sigmoid's bias
  bool counts = false;                                      // whether sigmoid's offset is log n instead
  float kept = 1;                                           // 1 / (1 − dropout)
  uint32_t threshold = 0;                                   // hashes below it are dropped
  int64_t segments = 1;                                     // of the rows, backward
  int64_t most = 0;                                         // how many keys `top` keeps

  View query, key, value, vector, sink, seed, row, head, tau, output, grad;
  int biases = 0, lines = 0, terms = 0;
  View bias[MAX_BIASES], line[MAX_LINES], start[MAX_TERMS], stop[MAX_TERMS], allowed[MAX_TERMS];
  View d_query, d_key, d_value, d_vector, d_sink, d_bias[MAX_BIASES], d_line[MAX_LINES];
  View found, found_keys;  // what looking at the weights has found

  INLINE int64_t heads() const { return lead[axes - 1]; }
  INLINE int64_t units() const {
    int64_t n = 1;
    for (int i = 0; i < axes - 1; ++i) n *= lead[i];
    return n;
  }
  INLINE Unit unit(int64_t number) const {
    Unit found;
    for (int i = axes - 2; i >= 0; --i) {
      found.at[i] = number % lead[i];
      number /= lead[i];
    }
    return found;
  }
  INLINE int64_t offset_of(const View& view, const Unit& unit) const {
    int64_t offset = 0;
    for (int i = 0; i < axes - 1; ++i) offset += unit.at[i] * view.lead[i];
    return offset;
  }
  // Whether a gradient is wanted that adds up the gradients of scores.
  INLINE bool adds_up() const {
    bool found = bool(d_sink) || bool(d_vector);
    for (const View& view : d_bias) found |= bool(view);
    for (const View& view : d_line) found |= bool(view);
    return found;
  }
  INLINE int64_t per_head(const View& view) const { return view.lead[axes - 1]; }
};

// Dropout of a layer's numbers: see dropout.h.
struct Drop {
  enum Kind : int64_t { add, relu, relu_back };
  Kind kind;
  const float *x, *y;
  float* out;
  int64_t size;
  uint32_t seed, other, threshold;
  float kept;
};

// The kernels of one instruction set. Each returns whether all that it found is finite.
struct Kernels {
  const char* name;
  int lanes;
  bool (*forward)(const Problem&, int threads);
  bool (*backward)(const Problem&, int threads);
  bool (*weights)(const Problem&, int threads);  // dense, into `found`
  bool (*entropy)(const Problem&, int threads);
  bool (*top)(const Problem&, int threads);
  void (*dropout)(const Drop&, int threads);
  double (*peak)();  // the FLOP of a register-only loop that runs for about a millisecond
};

// Calls work(context, item) for each item, on up to this many threads, in any order. If an item throws, those
// that have begun are finished, the others are left out, and the first exception is thrown again.
void parallel(int64_t items, int threads, void (*work)(void*, int64_t), void* context);

// Throws a std::bad_alloc that tells the size. Defined once, outside the code of any instruction set.
[[noreturn]] void out_of_memory(size_t bytes);

}  // namespace regard
