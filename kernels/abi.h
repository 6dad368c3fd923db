// The interface to the kernels: the description of a call, and tables of normalizers, scores, types and tensors.
//
// Tensors have the axes (batch…, g, r, row, column); shared axes have stride 0 (see call/problem.py). The tables define
// the enums, the fields of `Problem`, the switches in kernels.cpp, and Python's constants (module.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

// Always inlined: otherwise, the linker might keep only the copy of a function for another instruction set.
#define INLINE inline __attribute__((always_inline))

namespace regard {

constexpr int MAX_LEAD = 10, MAX_TERMS = 4, MAX_BIASES = 4, MAX_LINES = 2;
constexpr int MATCHES = 3;  // token matches per row in write_sums (inspect.h)

// The normalizers: name, and policy in normalizers.h.
#define NORMALIZERS(X)    \
  X(softmax, Softmax)     \
  X(sigmoid, Sigmoid)     \
  X(relu, Relu)           \
  X(mean, Mean)           \
  X(sparsemax, Sparsemax) \
  X(entmax15, Entmax15)

// The activations of additive scores: name, and policy in activations.h.
#define ACTIVATIONS(X) X(tanh, Tanh) X(relu, Rectifier)

#define SCORES(X) X(dot, ) ACTIVATIONS(X)

#define TYPES(X) X(none) X(float32) X(bfloat16) X(float16) X(int64) X(boolean) X(int8)

// The tensors of a call: name, and allowed types (see module.cpp). `key_scale` and `value_scale` are the factors of
// int8 keys and values, one per token (see few_queries.h). `kept_weights`, [block][key][lane] of each unit, are the
// softmax weights of a small call: the forward pass writes them, and the backward pass reads them instead of computing
// them again (see `kept_weights_shape` in fused.py). `row` and `head` are the row and head indices, for biases and
// dropout. `center`, `span`, `token` and `key_token` define the sums over sets of keys in inspect.h, whose kernels
// write `result` and `indices`.
// clang-format off
#define TENSORS(X) \
  X(query, REAL) \
  X(key, STORED) \
  X(value, STORED) \
  X(key_scale, FLOAT) \
  X(value_scale, FLOAT) \
  X(vector, REAL) \
  X(sink, REAL) \
  X(seed, WHOLE) \
  X(row, WHOLE) \
  X(head, WHOLE) \
  X(tau, FLOAT) \
  X(output, REAL) \
  X(kept_weights, FLOAT) \
  X(grad, REAL) \
  X(result, FLOAT) \
  X(indices, WHOLE) \
  X(center, FLOAT) \
  X(span, WHOLE) \
  X(token, WHOLE) \
  X(key_token, WHOLE) \
  X(d_query, FLOAT) \
  X(d_key, FLOAT) \
  X(d_value, FLOAT) \
  X(d_vector, FLOAT) \
  X(d_sink, FLOAT)
// clang-format on

// Lists of tensors: name, allowed types, maximum number. `line`: relative bias; `start`, `stop`, `allowed`: mask term.
// clang-format off
#define TENSOR_LISTS(X) \
  X(bias, REAL, MAX_BIASES) \
  X(line, REAL, MAX_LINES) \
  X(start, WHOLE, MAX_TERMS) \
  X(stop, WHOLE, MAX_TERMS) \
  X(allowed, BOOLEAN, MAX_TERMS) \
  X(d_bias, FLOAT, MAX_BIASES) \
  X(d_line, FLOAT, MAX_LINES)
// clang-format on

#define NAME(name, ...) name,
enum class Type : int64_t { TYPES(NAME) };
enum class Family : int64_t { SCORES(NAME) };
enum class Normalizer : int64_t { NORMALIZERS(NAME) };
#undef NAME

struct View {
  char* data = nullptr;
  Type type = Type::none;
  int64_t lead[MAX_LEAD] = {};  // strides of the leading axes, in elements
  int64_t row = 0, column = 0;
  int64_t segment = 0;  // stride between the copies of a gradient, one per segment

  INLINE explicit operator bool() const { return data != nullptr; }
};

// The rows that share keys, identified by an index along each batch axis and a key head.
struct Unit {
  int64_t at[MAX_LEAD];
};

struct Problem {
  int axes = 0;  // number of leading axes: batch axes, key heads g, query heads r per key head
  int64_t lead[MAX_LEAD] = {};
  int64_t queries = 0, keys = 0, width = 0, value_width = 0;
  int64_t all_queries = 0, first_key = 0;  // number of queries, and index of the first key, in the full call
  Family family = Family::dot;
  Normalizer normalizer = Normalizer::softmax;
  float scale = 1, sharpness = 1, softcap = 0, offset = 0;  // sharpness: 1 / temperature; offset: sigmoid's bias
  bool counts = false;                                      // sigmoid: the offset is −log n, for n visible keys
  float kept = 1;                                           // 1 / (1 − dropout)
  uint32_t threshold = 0;                                   // weights with a smaller hash are dropped
  int64_t segments = 1;                                     // number of row segments in the backward pass
  int64_t k = 0;                                            // k of top-k, or the number of spans in write_sums

  int biases = 0, lines = 0, terms = 0;
#define FIELD(name, ...) View name;
#define LIST(name, types, size) View name[size];
  TENSORS(FIELD)
  TENSOR_LISTS(LIST)
#undef FIELD
#undef LIST

  INLINE int64_t heads() const { return lead[axes - 1]; }
  INLINE int64_t units() const {
    int64_t n = 1;
    for (int i = 0; i < axes - 1; ++i) n *= lead[i];
    return n;
  }
  INLINE Unit unit(int64_t number) const {
    Unit unit;
    for (int i = axes - 2; i >= 0; --i) {
      unit.at[i] = number % lead[i];
      number /= lead[i];
    }
    return unit;
  }
  INLINE int64_t offset_of(const View& view, const Unit& unit) const {
    int64_t offset = 0;
    for (int i = 0; i < axes - 1; ++i) offset += unit.at[i] * view.lead[i];
    return offset;
  }
  // Whether a requested gradient is a sum of the gradients of scores.
  INLINE bool adds_up() const {
    bool needed = bool(d_sink) || bool(d_vector);
    for (const View& view : d_bias) needed |= bool(view);
    for (const View& view : d_line) needed |= bool(view);
    return needed;
  }
  INLINE int64_t per_head(const View& view) const { return view.lead[axes - 1]; }
};

// Elementwise dropout: see dropout.h.
struct Drop {
  enum Kind : int64_t { add, relu, relu_back };
  Kind kind;
  struct Numbers {  // float32 or bfloat16
    char* at;
    bool half;
  } x, y, out;  // x.at may be null
  int64_t size;
  uint32_t seed, other, threshold;
  float kept;
};

// A linear layer: see linear.h. An int8 weight is packed, and its scales and bias are padded to whole blocks.
struct Linear {
  const float* x;      // rows × depth
  const void* weight;  // float32: columns × depth or, if transposed, depth × columns
  const float *scales, *bias;
  float* out;  // rows × columns
  int64_t rows, depth, columns;
  bool transposed = false;
};

// The most probable tokens: see vocabulary.h.
struct Best {
  const float* logits;  // rows × columns
  float* values;        // rows × k
  int64_t* tokens;      // rows × k
  int64_t rows, columns, first, k;
};

// A decoding step of a Transformer decoder: see decoder_step.h. Pointers to scratch memory come last.
struct Step {
  struct Norm {
    const float *weight, *bias;
  };
  struct Layer {
    const void* weight;
    const float *scales, *bias;
  };
  struct Block {
    Norm norms[3];
    Layer in_proj, out_proj, query, cross_out, ffn_in, ffn_out;
    float *cache, *source, *queries;  // queries: output for the cross-attention queries, or null
  };
  int64_t rows, width, groups, per_group, head, inner, vocabulary;
  int64_t length, capacity;  // number of cached tokens before this step, and capacity of the cache
  int64_t sources, slots, keys;
  const int64_t *index, *lengths;  // index: cross-attention slot (source · slots + i) of each row, or null
  bool norm_first;
  float eps;
  int64_t layers;
  const Block* blocks;
  Norm norm;
  Layer output;
  float *x, *logits;  // x: rows × width, modified; logits: rows × vocabulary
  float *normed, *y, *projected, *attended, *hidden, *spread;
};

// A stack of Transformer blocks: see transformer.h. An encoder uses neither norms[1] nor the cross-attention layers.
struct Stack {
  struct Block {
    Step::Norm norms[3];
    Step::Layer in_proj, out_proj, query, source, cross_out, ffn_in, ffn_out;  // source: keys and values of the source
  };
  int64_t width, groups, per_group, head, inner, layers;
  bool norm_first;
  float eps;
  const Block* blocks;
  Step::Norm first, last;  // before the first and after the last block; none if the weight is null

  int64_t queries() const { return groups * per_group * head; }
  int64_t key_values() const { return 2 * groups * head; }
  int64_t scratch() const { return 2 * width + 2 * queries() + key_values() + inner; }  // floats per row
};

// Sentences to be encoded: see `encode` in transformer.h.
struct Encode {
  const Stack* stack;
  float* x;               // rows × width: the embeddings, replaced by the encoder's output
  const int64_t* starts;  // the first row of each sentence, then the number of rows
  int64_t sentences;
  float* scratch;  // rows × stack->scratch()
};

// Hypotheses to be extended by one token: see `extend` in transformer.h.
struct Extend {
  const Stack* stack;
  float* x;               // rows × width: the embeddings, replaced by the decoder's output
  int64_t rows, length;   // length: number of cached tokens before this one
  float* const* caches;   // for each token, layers × counts[token] rows of keys and values
  const int64_t* counts;  // for each token, the number of hypotheses when it was cached
  const int32_t* cached;  // rows × stride: which of these hypotheses a row continues
  int64_t stride;
  const int32_t* sentences;     // the sentence of each row
  const float* const* sources;  // for each layer, the keys and values of all source tokens
  const int64_t* starts;        // the first source token of each sentence, then the number of tokens
  int64_t recorded;             // the layer whose cross-attention weights to record, or −1
  float* weights;               // rows × heads × max_source
  int64_t max_source;           // length of the longest sentence
  float* scratch;               // rows × stack->scratch()
};

// The kernels of one instruction set. A kernel that returns bool returns whether its result is finite.
struct Kernels {
  const char* name;
  int lanes, tile_keys;  // floats in a vector, and maximum number of keys in a tile
  int few, max_few;      // maximum number of rows vectorized over the width, and for a single query (block.h)
  bool (*forward)(const Problem&, int threads);
  bool (*backward)(const Problem&, int threads);
  bool (*weights)(const Problem&, int threads);  // dense weights
  bool (*entropy)(const Problem&, int threads);
  bool (*topk)(const Problem&, int threads);
  bool (*sums)(const Problem&, int threads);  // sums over sets of keys
  void (*dropout)(const Drop&, int threads);
  void (*linear)(const Linear&, int threads);
  void (*linear_int8)(const Linear&, int threads);
  void (*best)(const Best&, int threads);
  bool (*step)(const Step&, int threads);
  bool (*encode)(const Encode&, int threads);
  bool (*extend)(const Extend&, int threads);
  bool (*try_tiles)();  // whether tiles give the right result; may raise SIGILL; null without tiles
  double (*peak)();     // runs a compute-bound loop for about a millisecond; returns its FLOPs
};

// Calls work(context, item) for each item, on up to `threads` threads, in any order. If an item throws, running items
// finish, the others are skipped, and the first exception is rethrown.
void parallel(int64_t items, int threads, void (*work)(void*, int64_t), void* context);

// Throws a std::bad_alloc that states the size. Defined once, in code that is compiled for any processor.
[[noreturn]] void out_of_memory(size_t bytes);

}  // namespace regard
