// Random problems for the kernels of one instruction set, without Python and torch: compared with loops in double.
// Buffers have exactly the size of their tensors, so a sanitizer detects every access beyond them.
//
//   c++ -std=c++17 -Ikernels -DISA=generic -c tests/sanitize*.cpp
//   c++ -std=c++17 -Ikernels -DISA=generic -fsanitize=address,undefined -Dposix_memalign=allocate -c kernels/kernels.cpp kernels/instantiate_backward.cpp kernels/search.cpp
//   c++ -fsanitize=address,undefined sanitize*.o kernels.o instantiate_backward.o search.o && ./a.out ROUNDS [poison | exhaust]
//
// With poison, some numbers are NaN or infinite, and the kernels must report it. With exhaust, each allocation in the
// kernels fails once, and they must throw; the sanitizer checks that they free their memory.
#include "sanitize.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

extern "C" int allocate(void** found, size_t alignment, size_t bytes) {
  if (left == 0) return 12;  // ENOMEM
  if (left > 0) --left;
  return posix_memalign(found, alignment, bytes);
}

namespace regard {
void out_of_memory(size_t) { throw std::bad_alloc(); }

void parallel(int64_t items, int, void (*work)(void*, int64_t), void* context) {
  for (int64_t i = 0; i < items; ++i) work(context, backwards ? items - 1 - i : i);
}
}  // namespace regard

using namespace regard;

namespace {

// A tensor with any strides, whose last element is at the end of its buffer.
struct Tensor {
  std::vector<int64_t> sizes, strides;
  Type type = Type::none;
  char* buffer = nullptr;
  int64_t skip = 0;  // elements before the first

  Tensor() = default;
  Tensor(const Tensor&) = delete;
  ~Tensor() { free(buffer); }

  static int64_t bytes(Type type) {
    return type == Type::int64 ? 8 : type == Type::float32 ? 4 : type == Type::boolean || type == Type::int8 ? 1 : 2;
  }

  // Contiguous without dice; otherwise with random strides.
  void make(Type kind, std::vector<int64_t> shape, Dice* dice = nullptr) {
    type = kind;
    sizes = std::move(shape);
    strides.assign(sizes.size(), 0);
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;  // innermost first
    int64_t step = 1;
    if (dice && dice->chance(0.5)) {
      if (dice->chance(0.5)) std::swap(order[0], order[1]);
      if (dice->chance(0.5) && order.size() > 2) std::swap(order[1], order[2]);
      step = dice->in(1, 2);
      skip = dice->in(0, 1);
    }
    int64_t last = 0;
    bool empty = false;
    for (size_t axis : order) {
      strides[axis] = step;
      empty |= sizes[axis] == 0;
      last += (sizes[axis] - 1) * step;
      step *= std::max<int64_t>(sizes[axis], 1);
      if (dice && skip && dice->chance(0.2)) step += 1;
    }
    const size_t size = size_t(empty ? 0 : (skip + last + 1) * bytes(type));
    buffer = static_cast<char*>(malloc(size ? size : 1));
    memset(buffer, 0xFF, size);  // NaN, which reveals reads of unwritten memory
  }

  char* data() const { return buffer + skip * bytes(type); }

  int64_t place(const std::vector<int64_t>& lead, int64_t row, int64_t column) const {
    int64_t at = 0;
    const size_t axes = sizes.size() - 2;
    for (size_t i = 0; i < axes; ++i) at += (sizes[i] == 1 ? 0 : lead[i]) * strides[i];
    return at + (sizes[axes] == 1 ? 0 : row) * strides[axes] + (sizes[axes + 1] == 1 ? 0 : column) * strides[axes + 1];
  }

  double get(const std::vector<int64_t>& lead, int64_t row, int64_t column) const {
    const int64_t at = place(lead, row, column);
    switch (type) {
      case Type::float32: return reinterpret_cast<const float*>(data())[at];
      case Type::int64: return double(reinterpret_cast<const int64_t*>(data())[at]);
      case Type::boolean: return reinterpret_cast<const uint8_t*>(data())[at];
      case Type::int8: return reinterpret_cast<const int8_t*>(data())[at];
      default: break;
    }
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data())[at];
    const bool half = type == Type::float16;
    const int digits = half ? 10 : 7, power = (bits & 0x7fff) >> digits, bias = half ? 15 : 127;
    const double fraction = bits & ((1 << digits) - 1), sign = bits & 0x8000 ? -1 : 1;
    if (power == 2 * bias + 1) return fraction != 0 ? NAN : sign * INFINITE;
    if (power == 0) return sign * std::ldexp(fraction, 1 - bias - digits);
    return sign * std::ldexp(1 + std::ldexp(fraction, -digits), power - bias);
  }
  int64_t whole(const std::vector<int64_t>& lead, int64_t row, int64_t column) const {
    return reinterpret_cast<const int64_t*>(data())[place(lead, row, column)];
  }

  void set(const std::vector<int64_t>& lead, int64_t row, int64_t column, double x) {
    const int64_t at = place(lead, row, column);
    if (type == Type::float32) reinterpret_cast<float*>(data())[at] = float(x);
    if (type == Type::int64) reinterpret_cast<int64_t*>(data())[at] = int64_t(x);
    if (type == Type::boolean) reinterpret_cast<uint8_t*>(data())[at] = x != 0;
    if (type == Type::int8) reinterpret_cast<int8_t*>(data())[at] = int8_t(x);
    uint16_t* narrow = reinterpret_cast<uint16_t*>(data()) + at;
    if (type == Type::bfloat16) {
      const float wide = float(x);
      uint32_t bits;
      memcpy(&bits, &wide, 4);
      *narrow = uint16_t(bits >> 16 | (std::isnan(x) ? 1 : 0));
    }
    if (type == Type::float16) {
      int power;
      const double fraction = std::frexp(std::fabs(x), &power);
      const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
      if (!std::isfinite(x)) *narrow = uint16_t(sign | 0x7c00 | (std::isnan(x) ? 1 : 0));
      else if (x == 0) *narrow = sign;
      else if (power > -14) *narrow = uint16_t(sign | (power + 14) << 10 | int(std::floor((2 * fraction - 1) * 1024)));
      else *narrow = uint16_t(sign | int(std::floor(std::ldexp(std::fabs(x), 24))));
    }
  }

  template <class Number>
  void fill(Number number) {
    std::vector<int64_t> lead(sizes.begin(), sizes.end() - 2);
    each(lead, [&](const std::vector<int64_t>& at) {
      for (int64_t i = 0; i < sizes[sizes.size() - 2]; ++i)
        for (int64_t j = 0; j < sizes.back(); ++j) set(at, i, j, number());
    });
  }

  template <class Work>
  static void each(const std::vector<int64_t>& lead, Work work) {
    int64_t count = 1;
    for (int64_t n : lead) count *= n;
    std::vector<int64_t> at(lead.size());
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat;
      for (size_t i = lead.size(); i-- > 0; rest /= lead[i]) at[i] = rest % lead[i];
      work(at);
    }
  }

  // The view that module.cpp creates: stride 0 along axes of size 1. `segmented`: the first axis is the segments.
  View view(bool segmented = false) const {
    View found;
    const size_t first = segmented ? 1 : 0, axes = sizes.size() - 2 - first;
    found.data = data();
    found.type = type;
    found.segment = segmented ? strides[0] : 0;
    for (size_t i = 0; i < axes; ++i) found.lead[i] = sizes[first + i] == 1 ? 0 : strides[first + i];
    found.row = sizes[first + axes] == 1 ? 0 : strides[first + axes];
    found.column = sizes[first + axes + 1] == 1 ? 0 : strides[first + axes + 1];
    return found;
  }
};

struct Round {
  Dice dice;
  Problem p;
  std::vector<int64_t> lead;  // batch…, g, r
  bool poisoned = false;
  Tensor query, key, value, key_scale, value_scale, vector, sink, seed, row, head, tau, output, grad, kept_weights;
  Tensor bias[MAX_BIASES], line[MAX_LINES], start[MAX_TERMS], stop[MAX_TERMS], allowed[MAX_TERMS];
  std::string what;

  explicit Round(uint64_t number, bool poison) : dice{number * 7919 + 1} { build(poison); }

  Type narrow() { return Type(dice.of({1, 1, 1, 2, 3})); }

  // The leading axes of a tensor, each with its full size or 1, and two more.
  std::vector<int64_t> shape(int64_t rows, int64_t columns, double full = 0.5) {
    std::vector<int64_t> found;
    for (int64_t n : lead) found.push_back(dice.chance(full) ? n : 1);
    found.push_back(rows);
    found.push_back(columns);
    return found;
  }
  std::vector<int64_t> per_key(int64_t columns) {
    auto found = shape(p.keys, columns, 0.8);
    found[lead.size() - 1] = 1;
    return found;
  }

  void sizes() {
    const int64_t axes = dice.in(2, 4);
    for (int64_t i = 0; i < axes; ++i) lead.push_back(dice.of({1, 1, 2, 3}));
    if (dice.chance(0.1)) lead.back() = 8;
    p.queries = dice.of({1,  1,  2,  3,  4,  5,  7,  11, 12, 13,  15,  16,  17,
                         23, 24, 25, 31, 33, 47, 63, 64, 65, 127, 128, 129, 150});
    p.keys = dice.of({0, 1, 2, 3, 4, 7, 15, 16, 17, 33, 71, 72, 73, 96, 127, 128, 129, 143, 144, 145, 193, 257});
    if (dice.chance(0.06)) p.keys = dice.in(1500, 2400), p.queries = dice.in(1, 4), lead.assign({1, dice.in(1, 2)});
    p.width = dice.of({0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65});
    p.value_width = dice.of({0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65});
    const auto work = [&] {
      int64_t n = p.queries * std::max<int64_t>(p.keys, 1) * (p.width + p.value_width + 8);
      for (int64_t m : lead) n *= m;
      return n;
    };
    while (work() > 2000000) {
      auto most = std::max_element(lead.begin(), lead.end());
      if (*most > 1) *most = 1;
      else if (p.queries > 8) p.queries /= 2;
      else p.width /= 2, p.value_width /= 2;
    }
    p.axes = int(lead.size());
    std::copy(lead.begin(), lead.end(), p.lead);
  }

  void build(bool poison) {
    sizes();
    p.first_key = dice.chance(0.2) ? dice.in(1, 9) : 0;
    p.family = Family(dice.of({0, 0, 0, 1, 2}));
    p.normalizer = Normalizer(dice.in(0, 5));
    p.scale = dice.chance(0.8) ? 1 / std::sqrt(float(std::max<int64_t>(p.width, 1))) : 0.3f;
    const auto normal = [&] { return dice.normal(); };
    const Type type = narrow();
    query.make(type, shape(p.queries, p.width, 0.9), &dice);
    query.fill(normal);
    const bool quantized = p.family == Family::dot && dice.chance(0.25);
    store(key, key_scale, p.key_scale, type, p.width, quantized && dice.chance(0.9));
    store(value, value_scale, p.value_scale, type, p.value_width, quantized && dice.chance(0.9));
    if (poison) spoil();
    p.query = query.view(), p.key = key.view(), p.value = value.view();
    if (p.width == 1) p.query.column = p.key.column = 1;
    if (p.value_width == 1) p.value.column = 1;
    if (p.family != Family::dot) {
      vector.make(narrow(), shape(1, p.width, 0.3), &dice);
      vector.sizes[lead.size() - 1] = 1;  // shared by the heads of a key head
      vector.fill([&] { return dice.normal() * p.scale; });
      p.vector = vector.view();
    } else if (dice.chance(0.3)) {
      p.softcap = float(dice.of({1, 3}));
    }
    settings();
    numbering();
    biases();
    mask();
    grad.make(Type::float32, whole(p.value_width), &dice);
    grad.fill(normal);
    p.grad = grad.view();
    if (p.value_width == 1) p.grad.column = 1;
    output.make(Type::float32, whole(p.value_width));
    tau.make(Type::float32, whole(2));
    p.output = output.view(), p.tau = tau.view();
    if (lead.back() == 1 && p.queries <= kernels.tile_keys && dice.chance(0.5)) {
      std::vector<int64_t> sizes = lead;
      sizes.push_back(p.keys);
      sizes.push_back((p.queries + kernels.lanes - 1) / kernels.lanes * kernels.lanes);
      kept_weights.make(Type::float32, sizes);
      p.kept_weights = kept_weights.view();
    }
    say();
  }

  // Keys or values: floats, or int8 with one scale per token.
  void store(Tensor& tensor, Tensor& scale, View& view, Type type, int64_t columns, bool quantized) {
    tensor.make(quantized ? Type::int8 : type, per_key(columns), &dice);
    tensor.fill([&] { return quantized ? double(dice.in(-127, 127)) : dice.normal(); });
    if (!quantized) return;
    scale.make(Type::float32, per_key(1), &dice);
    scale.fill([&] { return 0.001 + 0.01 * std::fabs(dice.normal()); });
    view = scale.view();
  }
  double key_at(const std::vector<int64_t>& at, int64_t j, int64_t t) const {
    return key.get(at, j, t) * (key.type == Type::int8 ? key_scale.get(at, j, 0) : 1);
  }
  double value_at(const std::vector<int64_t>& at, int64_t j, int64_t t) const {
    return value.get(at, j, t) * (value.type == Type::int8 ? value_scale.get(at, j, 0) : 1);
  }

  std::vector<int64_t> whole(int64_t columns) const {
    auto found = lead;
    found.push_back(p.queries);
    found.push_back(columns);
    return found;
  }

  void settings() {
    if (p.normalizer == Normalizer::softmax) {
      if (dice.chance(0.4)) {
        sink.make(narrow(), shape(1, 1), &dice);
        sink.fill([&] { return dice.chance(0.1) ? -INFINITE : dice.normal(); });
        p.sink = sink.view();
      } else if (dice.chance(0.3)) {
        p.sharpness = 0.6f;
      }
    }
    if (p.normalizer == Normalizer::sigmoid) {
      p.counts = dice.chance(0.5);
      p.offset = p.counts ? 0 : -0.5f;
    }
  }

  // Consecutive rows, or arbitrary rows of a longer sequence; and dropout, which hashes their numbers.
  void numbering() {
    const bool part = dice.chance(0.3);
    p.all_queries = p.queries + (part ? dice.in(0, 9) : 0);
    row.make(Type::int64, std::vector<int64_t>(lead.size() + 2, 1));
    row.sizes[lead.size()] = p.queries;
    free(row.buffer);
    row.make(Type::int64, row.sizes, &dice);
    const bool any = part && dice.chance(0.5);
    const int64_t first = part ? dice.in(0, p.all_queries - p.queries) : 0;
    for (int64_t i = 0; i < p.queries; ++i)
      row.set({}, i, 0, double(any ? dice.in(0, p.all_queries - 1) : first + i));
    p.row = row.view();
    if (!dice.chance(0.25)) return;
    const double dropout = dice.chance(0.5) ? 0.1 : 0.6;
    p.threshold = uint32_t(dropout * 4294967296.0);
    p.kept = float(1 / (1 - dropout));
    seed.make(Type::int64, shape(1, 1, 0.2));
    seed.sizes[lead.size() - 1] = 1;
    seed.fill([&] { return double(dice.next() >> 32); });
    head.make(Type::int64, shape(1, 1, 1));
    int64_t count = 0;
    head.fill([&] { return double(count++); });
    p.seed = seed.view(), p.head = head.view();
  }

  void biases() {
    p.biases = int(dice.of({0, 0, 0, 1, 1, 2, 3}));
    for (int i = 0; i < p.biases; ++i) {
      const int64_t form = dice.in(0, 3);
      bias[i].make(narrow(), shape(form == 1 ? 1 : p.queries, form == 2 ? 1 : p.keys), &dice);
      const bool hides = dice.chance(0.2);
      bias[i].fill([&] { return hides && dice.chance(0.2) ? -INFINITE : dice.normal(); });
      p.bias[i] = bias[i].view();
    }
    p.lines = int(dice.of({0, 0, 0, 1, 2}));
    for (int i = 0; i < p.lines; ++i) {
      line[i].make(narrow(), shape(1, std::max<int64_t>(p.all_queries + p.first_key + p.keys - 1, 0)), &dice);
      const bool hides = dice.chance(0.1);
      line[i].fill([&] { return hides && dice.chance(0.2) ? -INFINITE : dice.normal(); });
      p.line[i] = line[i].view();
    }
  }

  void mask() {
    p.terms = int(dice.of({0, 0, 1, 1, 1, 2, 3, 4}));
    for (int i = 0; i < p.terms; ++i) {
      const int64_t rows = dice.chance(0.8) ? p.queries : 1;
      const int64_t form = dice.in(0, 3);  // causal, window, documents, arbitrary
      const int64_t length = dice.in(1, 40), shift = p.keys - p.queries;
      if (form != 0) start[i].make(Type::int64, shape(rows, 1, 0.3), &dice);
      stop[i].make(Type::int64, shape(rows, 1, 0.3), &dice);
      const auto put = [&](Tensor& side, bool last) {
        std::vector<int64_t> axes(side.sizes.begin(), side.sizes.end() - 2);
        Tensor::each(axes, [&](const std::vector<int64_t>& at) {
          for (int64_t q = 0; q < rows; ++q) {
            int64_t x = dice.in(-5, p.keys + 5);
            if (form == 0) x = q + shift + 1;
            if (form == 1) x = q + shift + (last ? length : -length);
            if (form == 2) x = (q / length + last) * length;
            side.set(at, q, 0, double(x + p.first_key));
          }
        });
      };
      if (form != 0) put(start[i], false), p.start[i] = start[i].view();
      if (form != 3 || dice.chance(0.5)) put(stop[i], true), p.stop[i] = stop[i].view();
      if (dice.chance(0.3)) {
        allowed[i].make(Type::boolean, shape(dice.chance(0.8) ? p.queries : 1, dice.chance(0.8) ? p.keys : 1), &dice);
        allowed[i].fill([&] { return double(dice.chance(0.6)); });
        p.allowed[i] = allowed[i].view();
      }
    }
  }

  void spoil() {
    poisoned = true;
    const double bad[] = {NAN, NAN, INFINITE, -INFINITE};
    for (Tensor* t : {&query, key.type == Type::int8 ? &key_scale : &key, value.type == Type::int8 ? &value_scale : &value})
      if (dice.chance(0.5)) t->fill([&] { return dice.chance(0.01) ? bad[dice.in(0, 3)] : dice.normal(); });
  }

  void say() {
    what = "lead";
    for (int64_t n : lead) what += " " + std::to_string(n);
    const auto add = [&](const char* name, int64_t n) { what += std::string(", ") + name + " " + std::to_string(n); };
    add("queries", p.queries), add("keys", p.keys), add("width", p.width), add("value_width", p.value_width);
    add("family", int64_t(p.family)), add("normalizer", int64_t(p.normalizer)), add("type", int64_t(query.type));
    add("biases", p.biases), add("lines", p.lines), add("terms", p.terms), add("sink", bool(p.sink));
    add("dropout", p.threshold), add("first_key", p.first_key);
    add("key's type", int64_t(key.type)), add("value's type", int64_t(value.type));
  }
};

// The formulas, one row at a time.

using Numbers = std::vector<double>;

struct Row {
  Numbers match, scores, cap, weights, slopes, keep;  // per key
  std::vector<Numbers> inner;                         // act(query + key), for the additive families
  double total = 0, at_sink = 0;                      // Σ slopes, and the sink's share
  bool broken = false;                                // the row sees a score of NaN or +inf
  bool edge = false;                                  // a number is so close to a kink that rounding decides
  bool seen(size_t j) const { return scores[j] != -INFINITE; }
};

bool visible(const Round& r, const std::vector<int64_t>& at, int64_t i, int64_t j) {
  const Problem& p = r.p;
  for (int t = 0; t < p.terms; ++t) {
    const int64_t k = j + p.first_key;
    if (p.start[t] && k < r.start[t].whole(at, i, 0)) continue;
    if (p.stop[t] && k >= r.stop[t].whole(at, i, 0)) continue;
    if (p.allowed[t] && r.allowed[t].get(at, i, j) == 0) continue;
    return true;
  }
  return p.terms == 0;
}

double activate(Family family, double x) {
  if (family == Family::tanh) return std::tanh(x);
  return x < 0 ? 0 : x;
}

void find_scores(const Round& r, const std::vector<int64_t>& at, int64_t i, Row& row) {
  const Problem& p = r.p;
  row.inner.resize(size_t(p.keys));
  for (int64_t j = 0; j < p.keys; ++j) {
    double s = 0;
    for (int64_t t = 0; t < p.width; ++t) {
      const double q = r.query.get(at, i, t), k = r.key_at(at, j, t);
      if (p.family == Family::dot) {
        s += q * double(p.scale) * k;
      } else {
        row.inner[size_t(j)].push_back(activate(p.family, q + k));
        s += r.vector.get(at, 0, t) * row.inner[size_t(j)].back();
        if (p.family == Family::relu && std::fabs(q + k) < 1e-5 && q + k != 0) row.edge = true;
      }
    }
    double cap = 1;
    if (p.softcap > 0) {
      const double x = std::tanh(s / p.softcap);
      s = x * p.softcap;
      cap = 1 - x * x;
    }
    for (int b = 0; b < p.biases; ++b) s += r.bias[b].get(at, i, j);
    const int64_t distance = p.first_key + j + p.all_queries - 1 - r.row.whole({}, i, 0);
    for (int l = 0; l < p.lines; ++l) s += r.line[l].get(at, 0, distance);
    if (!visible(r, at, i, j)) s = -INFINITE;
    // the sigmoid of infinity is 1
    if (std::isnan(s) || (s == INFINITE && p.normalizer != Normalizer::sigmoid)) row.broken = true;
    row.scores.push_back(s);
    row.cap.push_back(cap);
  }
}

// τ with Σ φ(score − τ) = 1, by bisection.
template <class Phi>
double root(const Numbers& scores, Phi phi) {
  const double top = *std::max_element(scores.begin(), scores.end());
  double low = top - 2, high = top;
  for (int i = 0; i < 80; ++i) {
    const double middle = (low + high) / 2;
    double sum = 0;
    for (double s : scores) sum += s == -INFINITE ? 0 : phi(s - middle);
    (sum > 1 ? low : high) = middle;
  }
  return (low + high) / 2;
}

void normalize(const Round& r, const std::vector<int64_t>& at, Row& row) {
  const Problem& p = r.p;
  double count = 0, top = -INFINITE;
  for (double s : row.scores) count += s != -INFINITE, top = std::max(top, s);
  const double n = std::max(count, 1.0), sink = p.sink ? r.sink.get(at, 0, 0) : -INFINITE;
  if (p.normalizer == Normalizer::softmax && (count > 0 || sink != -INFINITE)) {
    top = std::max(top, sink);
    double sum = sink == -INFINITE ? 0 : std::exp(sink - top);
    const auto power = [&](double s) { return s == -INFINITE ? 0 : std::exp((s - top) * double(p.sharpness)); };
    for (double s : row.scores) sum += power(s);
    for (double s : row.scores) row.weights.push_back(power(s) / sum);
    for (double w : row.weights) row.slopes.push_back(w * double(p.sharpness));
    row.at_sink = sink == -INFINITE ? 0 : std::exp(sink - top) / sum;
  } else if (p.normalizer == Normalizer::sparsemax && count > 0) {
    const double tau = root(row.scores, [](double x) { return std::max(x, 0.0); });
    for (double s : row.scores) {
      row.weights.push_back(s == -INFINITE ? 0 : std::max(s - tau, 0.0));
      row.slopes.push_back(row.weights.back() > 0);
      row.edge |= std::fabs(s - tau) < 1e-5;
    }
  } else if (p.normalizer == Normalizer::entmax15 && count > 0) {
    const auto half = [](double x) { return std::max(x / 2, 0.0); };
    const double tau = root(row.scores, [&](double x) { return half(x) * half(x); });
    for (double s : row.scores) {
      const double x = s == -INFINITE ? 0 : half(s - tau);
      row.weights.push_back(x * x);
      row.slopes.push_back(x);
    }
  } else {
    for (double s : row.scores) {
      const double w = 1 / (1 + std::exp((p.counts ? std::log(n) : -double(p.offset)) - s));
      const bool seen = s != -INFINITE;
      row.edge |= p.normalizer == Normalizer::relu && std::fabs(s) < 1e-5;
      const auto put = [&](double weight, double slope) {
        row.weights.push_back(seen ? weight : 0);
        row.slopes.push_back(seen ? slope : 0);
      };
      switch (p.normalizer) {
        case Normalizer::sigmoid: put(w, w * (1 - w)); break;
        case Normalizer::relu: put(std::max(s, 0.0) / n, s > 0 ? 1 / n : 0); break;
        case Normalizer::mean: put(s / n, 1 / n); break;
        default: put(0, 0);
      }
    }
  }
  for (double g : row.slopes) row.total += g;
}

Row solve(const Round& r, const std::vector<int64_t>& at, int64_t i) {
  const Problem& p = r.p;
  Row row;
  find_scores(r, at, i, row);
  if (!row.broken) normalize(r, at, row);
  for (int64_t j = 0; j < p.keys; ++j) {
    double keep = 1;
    if (p.threshold) {
      const uint32_t number = uint32_t(r.head.whole(at, 0, 0) * p.all_queries + r.row.whole({}, i, 0));
      const uint32_t first = mix(number ^ uint32_t(r.seed.whole(at, 0, 0))), second = mix(first + 0x9E3779B9u);
      keep = mix(mix(uint32_t(p.first_key + j) ^ first) ^ second) >= p.threshold ? double(p.kept) : 0;
    }
    row.keep.push_back(keep);
  }
  return row;
}

// Reports a failure with everything needed to reproduce it.
struct Judge {
  uint64_t number;
  const Round& r;
  bool bad = false;

  void expect(bool right, const char* name) {
    if (right || bad) return;
    printf("round %lld: %s\n  %s\n", (long long)number, name, r.what.c_str());
    bad = true;
  }
  void near(double found, double wanted, double size, const char* name) {
    if (bad || std::fabs(found - wanted) <= 3e-5 * (size + std::fabs(wanted)) || found == wanted) return;
    printf("round %lld: %s is %g and should be %g\n  %s\n", (long long)number, name, found, wanted, r.what.c_str());
    bad = true;
  }
};

// Compares every result for a problem with the formulas.
struct Trial {
  Round& r;
  Judge judge;
  bool exhausting = false;
  int64_t refused = 0;
  Problem& p = r.p;
  bool sums_to_one = p.normalizer == Normalizer::softmax || p.normalizer == Normalizer::sparsemax ||
                     p.normalizer == Normalizer::entmax15;

  template <class Work>
  void each_row(Work work) {
    Tensor::each(r.lead, [&](const std::vector<int64_t>& at) {
      for (int64_t i = 0; i < p.queries; ++i) work(at, i, solve(r, at, i));
    });
  }

  // Runs a kernel twice, in both orders of its items: the bits must be the same. `clear` resets sums.
  template <class Clear>
  bool run(bool (*kernel)(const Problem&, int), const Problem& problem, std::vector<Tensor*> written, Clear clear) {
    std::vector<std::vector<char>> first;
    bool found = false;
    for (bool order : {false, true}) {
      backwards = order;
      clear();
      const bool finite = kernel(problem, 4);
      if (order) judge.expect(finite == found, "what is finite depends on the order of the work");
      found = finite;
      for (size_t i = 0; i < written.size(); ++i) {
        const Tensor& t = *written[i];
        int64_t count = 1;
        for (int64_t n : t.sizes) count *= n;
        const char* from = t.data();
        std::vector<char> bytes(from, from + count * Tensor::bytes(t.type));
        if (order) judge.expect(bytes == first[i], "the order of the work changes bits");
        else first.push_back(bytes);
      }
    }
    return found;
  }

  void forward() {
    if (exhausting) exhaust(kernels.forward, p);
    const bool finite = run(kernels.forward, p, {&r.output, &r.tau}, [] {});
    bool all = true;
    each_row([&](const std::vector<int64_t>& at, int64_t i, const Row& row) {
      for (int64_t e = 0; e < p.value_width; ++e) {
        double wanted = row.broken ? NAN : 0;
        for (int64_t j = 0; j < p.keys && !row.broken; ++j) {
          const double weight = row.weights[size_t(j)] * row.keep[size_t(j)];
          if (weight != 0) wanted += weight * r.value_at(at, j, e);  // a zero weight does not read its value
        }
        all &= std::isfinite(wanted);
        if (!r.poisoned) judge.near(r.output.get(at, i, e), wanted, 1, "output");
      }
    });
    if (!all) judge.expect(!finite, "something is not finite, and the kernel does not say so");
    if (!r.poisoned) judge.expect(finite, "all is finite, and the kernel does not say so");
  }

  // An output of another type equals the float32 output, rounded.
  void narrow() {
    if (!p.output || r.poisoned) return;
    Tensor half;
    half.make(r.dice.chance(0.5) ? Type::bfloat16 : Type::float16, r.whole(p.value_width));
    Problem other = p;
    other.output = half.view();
    if (exhausting) exhaust(kernels.forward, other);
    run(kernels.forward, other, {&half, &r.tau}, [] {});
    const double size = half.type == Type::bfloat16 ? 0x1p-8 : 0x1p-11;
    each_row([&](const std::vector<int64_t>& at, int64_t i, const Row&) {
      for (int64_t e = 0; e < p.value_width; ++e) {
        const double wanted = r.output.get(at, i, e);
        if (std::fabs(wanted) > 60000) continue;  // infinite in float16
        judge.near(half.get(at, i, e), wanted, size / 3e-5 * std::fabs(wanted) + 0x1p-24 / 3e-5, "narrow output");
      }
    });
  }

  // Lets each allocation of a kernel fail once, and counts them.
  void exhaust(bool (*kernel)(const Problem&, int), const Problem& problem) {
    const int64_t failed = ::exhaust([&] { kernel(problem, 4); });
    judge.expect(failed >= 0, "a kernel never has enough memory");
    refused += failed;
  }

  // τ is the same without values.
  void fit() {
    Tensor again;
    again.make(Type::float32, r.whole(2));
    Problem other = p;
    other.value = other.output = other.grad = View();
    other.value_width = 0;
    other.tau = again.view();
    kernels.forward(other, 4);
    Tensor::each(r.lead, [&](const std::vector<int64_t>& at) {
      for (int64_t i = 0; i < p.queries; ++i)
        for (int k : {0, 1}) judge.expect(again.get(at, i, k) == r.tau.get(at, i, k), "τ without values is another");
    });
  }

  void look() {
    Problem other = p;
    other.value = other.output = other.grad = View();
    other.value_width = 0;
    Tensor weights, entropy, values, keys;
    weights.make(Type::float32, r.whole(p.keys));
    weights.fill([] { return 0; });
    entropy.make(Type::float32, r.whole(1));
    other.result = weights.view();
    run(kernels.weights, other, {&weights}, [] {});
    other.result = entropy.view();
    run(kernels.entropy, other, {&entropy}, [] {});
    const int64_t most = r.dice.in(1, std::max<int64_t>(std::min<int64_t>(p.keys, 64), 1));
    values.make(Type::float32, r.whole(most));
    keys.make(Type::int64, r.whole(most));
    other.result = values.view();
    other.indices = keys.view();
    other.k = most;
    if (exhausting) exhaust(kernels.topk, other);
    run(kernels.topk, other, {&values, &keys}, [] {});
    each_row([&](const std::vector<int64_t>& at, int64_t i, const Row& row) {
      double wanted = 0;
      Numbers sorted;
      for (int64_t j = 0; j < p.keys; ++j) {
        const double w = row.weights[size_t(j)] * row.keep[size_t(j)];
        judge.near(weights.get(at, i, j), w, 1, "weights");
        wanted -= w > 0 ? w * std::log(w) : w < 0 ? INFINITE : 0;
        if (row.seen(size_t(j))) sorted.push_back(w);
      }
      judge.near(entropy.get(at, i, 0), wanted, 1, "entropy");
      std::sort(sorted.rbegin(), sorted.rend());
      for (int64_t k = 0; k < most; ++k) {
        const int64_t name = keys.whole(at, i, k), first = p.first_key;
        const bool there = size_t(k) < sorted.size();
        const double found = values.get(at, i, k);
        judge.near(found, there ? sorted[size_t(k)] : 0, 1, "top");
        judge.expect(there ? name >= first && name < first + p.keys : name == -1, "top's key");
        if (judge.bad || name < 0) continue;
        judge.near(weights.get(at, i, name - first), found, 1, "the weight of top's key");
        for (int64_t before = 0; before < k; ++before)
          judge.expect(keys.whole(at, i, before) != name, "top names a key twice");
      }
    });
  }

  // Sums over spans and over keys with the same token. Positions may be outside the keys.
  void add_up() {
    Problem other = p;
    other.value = other.output = other.grad = View();
    other.value_width = 0;
    const int64_t spans = r.dice.in(0, 3), matches = r.dice.chance(0.7) ? MATCHES : 0;
    const int64_t columns = 4 + spans + 2 * matches;
    const auto any_key = [&] { return double(p.first_key + r.dice.in(-2, p.keys + 2)); };
    auto key_shape = r.lead;
    key_shape.back() = 1;  // the heads of a key head share its tokens
    key_shape.push_back(p.keys);
    key_shape.push_back(MATCHES);
    Tensor center, span, token, key_token, sums;
    center.make(Type::float32, r.whole(1), &r.dice);
    center.fill(any_key);
    span.make(Type::int64, r.whole(2 * spans), &r.dice);
    span.fill(any_key);
    token.make(Type::int64, r.whole(2 * MATCHES), &r.dice);
    bool limit = true;
    token.fill([&] { return (limit = !limit) ? any_key() : double(r.dice.in(0, 3)); });
    key_token.make(Type::int64, key_shape, &r.dice);
    key_token.fill([&] { return double(r.dice.in(0, 3)); });
    sums.make(Type::float32, r.whole(columns));
    other.center = center.view();
    other.span = span.view();
    if (matches) other.token = token.view(), other.key_token = key_token.view();
    other.result = sums.view();
    other.k = spans;
    if (exhausting) exhaust(kernels.sums, other);
    run(kernels.sums, other, {&sums}, [] {});
    each_row([&](const std::vector<int64_t>& at, int64_t i, const Row& row) {
      Numbers wanted(size_t(columns), 0);
      const auto largest = [&](int64_t column, double w) { wanted[size_t(column)] = std::max(wanted[size_t(column)], w); };
      for (int64_t j = 0; j < p.keys; ++j) {
        const double w = row.weights[size_t(j)] * row.keep[size_t(j)];
        const int64_t key = p.first_key + j;
        wanted[0] += w;
        wanted[1] -= w > 0 ? w * std::log(w) : w < 0 ? INFINITE : 0;
        wanted[2] += w * std::fabs(double(key) - center.get(at, i, 0));
        largest(3, w);
        for (int64_t n = 0; n < spans; ++n)
          if (key >= span.whole(at, i, 2 * n) && key < span.whole(at, i, 2 * n + 1)) wanted[size_t(4 + n)] += w;
        for (int64_t n = 0; n < matches; ++n) {
          if (key >= token.whole(at, i, 2 * n + 1) || key_token.whole(at, j, n) != token.whole(at, i, 2 * n)) continue;
          wanted[size_t(4 + spans + 2 * n)] += w;
          largest(5 + spans + 2 * n, w);
        }
      }
      for (int64_t c = 0; c < columns; ++c)
        judge.near(sums.get(at, i, c), wanted[size_t(c)], double(c == 2 ? p.keys : 1), "sums over sets of keys");
    });
  }

  // Buffers for the gradients, in the layout of fused.py.
  struct Rooms {
    Tensor query, key, value, vector, sink, bias[MAX_BIASES], line[MAX_LINES];
    std::vector<Tensor*> written, sums;
  };

  void wish(Rooms& rooms) {
    const int64_t lanes = kernels.lanes;
    const auto padded = [&](int64_t n) { return (n + lanes - 1) / lanes * lanes; };
    const auto units = [&](int64_t rows, int64_t columns) {
      std::vector<int64_t> found{p.segments};
      found.insert(found.end(), r.lead.begin(), r.lead.end());
      found.back() = 1;
      found.push_back(rows);
      found.push_back(columns);
      return found;
    };
    const auto heads = [&](const Tensor& like) {
      std::vector<int64_t> found{p.segments};
      found.insert(found.end(), r.lead.begin(), r.lead.end());
      found.push_back(like.sizes[r.lead.size()]);
      found.push_back(like.sizes.back());
      return found;
    };
    const bool quantized = r.key.type == Type::int8 || r.value.type == Type::int8;  // gradient of the values only
    const bool every = r.dice.chance(0.4);
    const auto want = [&] { return every || r.dice.chance(0.4); };
    const auto put = [&](Tensor& room, View& view, std::vector<int64_t> sizes, bool segmented) {
      room.make(Type::float32, std::move(sizes));
      view = room.view(segmented);
      rooms.written.push_back(&room);
    };
    if (quantized) return put(rooms.value, p.d_value, units(p.keys, padded(p.value_width)), true);
    if (want()) put(rooms.query, p.d_query, r.whole(p.width), false);
    if (want()) put(rooms.key, p.d_key, units(p.keys, padded(p.width)), true);
    if (want()) put(rooms.value, p.d_value, units(p.keys, padded(p.value_width)), true);
    if (p.vector && want()) put(rooms.vector, p.d_vector, units(1, padded(p.width)), true);
    if (p.sink && want()) put(rooms.sink, p.d_sink, r.whole(1), false);
    for (int b = 0; b < p.biases; ++b) {
      if (!want()) continue;
      const bool dense = r.bias[b].sizes[r.lead.size()] > 1 && r.bias[b].sizes.back() > 1;
      auto sizes = heads(r.bias[b]);
      if (dense) sizes.erase(sizes.begin());  // each pair is in one segment
      put(rooms.bias[b], p.d_bias[b], sizes, !dense);
      rooms.sums.push_back(&rooms.bias[b]);
    }
    for (int l = 0; l < p.lines; ++l) {
      if (!want()) continue;
      put(rooms.line[l], p.d_line[l], heads(r.line[l]), true);
      rooms.sums.push_back(&rooms.line[l]);
    }
  }

  // A gradient, summed over the segments, excluding padding.
  static double summed(const Tensor& room, bool segmented, const std::vector<int64_t>& at, int64_t i, int64_t j) {
    if (!segmented) return room.get(at, i, j);
    double found = 0;
    for (int64_t s = 0; s < room.sizes[0]; ++s) {
      std::vector<int64_t> place{s};
      place.insert(place.end(), at.begin(), at.end());
      found += room.get(place, i, j);
    }
    return found;
  }

  void backward() {
    p.segments = r.dice.in(1, std::min<int64_t>(4, p.queries * r.lead.back()));
    if (p.kept_weights) p.segments = 1;  // calls with kept weights are too small for segments: see fused.py
    Rooms rooms;
    wish(rooms);
    if (rooms.written.empty()) return;
    if (exhausting) exhaust(kernels.backward, p);
    const bool finite = run(kernels.backward, p, rooms.written, [&] {
      for (Tensor* t : rooms.sums) t->fill([] { return 0; });
    });
    bool all = true;
    for (const Tensor* t : rooms.written) {
      int64_t count = 1;
      for (int64_t n : t->sizes) count *= n;
      for (int64_t i = 0; i < count; ++i) all &= std::isfinite(reinterpret_cast<const float*>(t->data())[i]);
    }
    judge.expect(all || !finite, "a gradient is not finite, and the kernel does not say so");
    if (r.poisoned) return;
    judge.expect(finite, "all gradients are finite, and the kernel does not say so");
    const size_t axes = r.lead.size();
    std::vector<int64_t> units = r.lead;
    units.back() = 1;
    Tensor::each(units, [&](std::vector<int64_t> at) {
      const size_t keys = size_t(p.keys), width = size_t(p.width), values = size_t(p.value_width);
      std::vector<Numbers> d_key(keys, Numbers(width)), d_value(keys, Numbers(values));
      Numbers d_vector(width);
      bool edge = false;
      for (int64_t h = 0; h < r.lead[axes - 1]; ++h) {
        at[axes - 1] = h;
        std::vector<Numbers> d_bias, d_line;
        for (int b = 0; b < p.biases; ++b) d_bias.emplace_back(size_t(r.bias[b].sizes[axes] * r.bias[b].sizes.back()));
        for (int l = 0; l < p.lines; ++l) d_line.emplace_back(size_t(r.line[l].sizes.back()));
        for (int64_t i = 0; i < p.queries; ++i) {
          const Row row = solve(r, at, i);
          edge |= row.edge;
          Numbers ds(keys), d_query(width);
          double c = 0;
          for (size_t j = 0; j < keys; ++j) {
            for (size_t e = 0; e < values; ++e) {
              const double d = r.grad.get(at, i, int64_t(e));
              ds[j] += d * r.value_at(at, int64_t(j), int64_t(e)) * row.keep[j];
              d_value[j][e] += row.weights[j] * row.keep[j] * d;
            }
            c += row.slopes[j] * ds[j];
          }
          const double total = row.total + row.at_sink * (p.sink ? double(p.sharpness) : 0);
          c = sums_to_one && total != 0 ? c / total : 0;
          if (p.d_sink && !edge) judge.near(rooms.sink.get(at, i, 0), -row.at_sink * c, 2, "sink's gradient");
          for (size_t j = 0; j < keys; ++j) {
            ds[j] = row.slopes[j] * (ds[j] - c);
            for (int b = 0; b < p.biases; ++b) {
              const bool rows = r.bias[b].sizes[axes] > 1, columns = r.bias[b].sizes.back() > 1;
              d_bias[size_t(b)][size_t((rows ? i : 0) * r.bias[b].sizes.back() + (columns ? int64_t(j) : 0))] += ds[j];
            }
            const int64_t distance = p.first_key + int64_t(j) + p.all_queries - 1 - r.row.whole({}, i, 0);
            for (int l = 0; l < p.lines; ++l)
              d_line[size_t(l)][size_t(r.line[l].sizes.back() > 1 ? distance : 0)] += ds[j];
            const double d = ds[j] * row.cap[j];
            for (size_t t = 0; t < width; ++t) {
              const double q = r.query.get(at, i, int64_t(t)), k = r.key_at(at, int64_t(j), int64_t(t));
              if (p.family == Family::dot) {
                d_query[t] += d * double(p.scale) * k;
                d_key[j][t] += d * double(p.scale) * q;
              } else {
                const double x = row.inner[j][t], v = r.vector.get(at, 0, int64_t(t));
                const double inner = p.family == Family::tanh ? 1 - x * x : q + k > 0 ? 1 : 0;
                d_query[t] += d * inner * v;
                d_key[j][t] += d * inner * v;
                d_vector[t] += d * x;
              }
            }
          }
          for (size_t t = 0; p.d_query && !row.edge && t < width; ++t)
            judge.near(rooms.query.get(at, i, int64_t(t)), d_query[t], 4, "query's gradient");
        }
        for (int b = 0; b < p.biases && !edge; ++b)
          for (int64_t i = 0; p.d_bias[b] && i < r.bias[b].sizes[axes]; ++i)
            for (int64_t j = 0; j < r.bias[b].sizes.back(); ++j) {
              const bool dense = r.bias[b].sizes[axes] > 1 && r.bias[b].sizes.back() > 1;
              const double wanted = d_bias[size_t(b)][size_t(i * r.bias[b].sizes.back() + j)];
              judge.near(summed(rooms.bias[b], !dense, at, i, j), wanted, 8, "bias's gradient");
            }
        for (int l = 0; l < p.lines && !edge; ++l)
          for (int64_t j = 0; p.d_line[l] && j < r.line[l].sizes.back(); ++j)
            judge.near(summed(rooms.line[l], true, at, 0, j), d_line[size_t(l)][size_t(j)], 8, "line's gradient");
      }
      for (size_t j = 0; j < keys && !edge; ++j) {
        for (size_t t = 0; p.d_key && t < width; ++t)
          judge.near(summed(rooms.key, true, at, int64_t(j), int64_t(t)), d_key[j][t], 8, "key's gradient");
        for (size_t e = 0; p.d_value && e < values; ++e)
          judge.near(summed(rooms.value, true, at, int64_t(j), int64_t(e)), d_value[j][e], 8, "value's gradient");
      }
      for (size_t t = 0; p.d_vector && t < width && !edge; ++t)
        judge.near(summed(rooms.vector, true, at, 0, int64_t(t)), d_vector[t], 8, "vector's gradient");
    });
  }
};

}  // namespace

int main(int count, char** arguments) {
  const int64_t rounds = count > 1 ? atoll(arguments[1]) : 100;
  const bool poison = count > 2 && !strcmp(arguments[2], "poison");
  const bool exhaust = count > 2 && !strcmp(arguments[2], "exhaust");
  int64_t refused = 0;
  const Mode mode = poison ? Mode::poison : exhaust ? Mode::exhaust : Mode::plain;
  int64_t failed = check_decoding(rounds, mode, refused) + check_search(rounds, mode, refused);
  for (int64_t number = 0; number < rounds; ++number) {
    Round round(uint64_t(number), poison);
    Trial trial{round, {uint64_t(number), round}, exhaust};
    trial.forward();
    if (!poison) {
      trial.narrow();
      trial.fit();
      trial.look();
      trial.add_up();
    }
    trial.backward();
    failed += trial.judge.bad;
    refused += trial.refused;
  }
  if (exhaust) printf("%lld allocations refused\n", (long long)refused);
  printf("%s: %lld of %lld rounds failed\n", kernels.name, (long long)failed, (long long)rounds);
  return failed ? 1 : 0;
}
