// The Python module. Tensors are passed as numbers (addresses, sizes, strides), so nothing here depends on torch.
// fused.py writes the numbers in the order in which they are read here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "isas.h"
#include "abi.h"
#include "calls.h"
#if defined(__x86_64__)
#include "detect_amx.h"
#endif
#include "search.h"

namespace nb = nanobind;

namespace regard {

#define DECLARE(isa) extern const Kernels kernels_##isa;
FOR_EACH_ISA(DECLARE)
#undef DECLARE

namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows f16c. F16C needs operating-system support for AVX, which the avx2
// check includes.
[[maybe_unused]] bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#define HAS_avx2 __builtin_cpu_supports("avx2")
#define HAS_fma __builtin_cpu_supports("fma")
#define HAS_f16c (__builtin_cpu_supports("avx2") && has_f16c())
#define HAS_avx512f __builtin_cpu_supports("avx512f")
#define HAS_avx512bw __builtin_cpu_supports("avx512bw")
#define HAS_avx512dq __builtin_cpu_supports("avx512dq")
#define HAS_avx512vl __builtin_cpu_supports("avx512vl")
#define HAS_avx512bf16 __builtin_cpu_supports("avx512bf16")
#define HAS_avx512vnni __builtin_cpu_supports("avx512vnni")
#define HAS_amx_tile has_amx()
#define HAS_amx_bf16 has_amx()
// Products of bfloat16 pairs run at twice the rate of float32 on AMD's processors, and at half the rate on Intel's.
#define FAST_PAIRS __builtin_cpu_is("amd")
#else
#define FAST_PAIRS true
bool succeeds(bool (*trial)()) { return trial(); }
#endif

// Returns the processor features that an instruction set's kernels use, according to their compiler flags.
std::vector<std::string> features(const std::string& name) {
#define FEATURE(feature) #feature,
#define LIST(isa) \
  if (name == #isa) return {FEATURES_##isa(FEATURE)};
  FOR_EACH_ISA(LIST)
#undef LIST
#undef FEATURE
  throw std::invalid_argument("no kernels for the instruction set " + name);
}

bool has_features(const std::string& name) {
#define AND(feature) &&HAS_##feature
#define RUNS(isa) \
  if (name == #isa) return true FEATURES_##isa(AND);
  FOR_EACH_ISA(RUNS)
#undef RUNS
#undef AND
  return false;
}

// The instruction sets in this build that this machine can run, best first.
std::vector<const Kernels*> find_runnable() {
#define LIST(isa) &kernels_##isa,
  std::vector<const Kernels*> all;
  for (const Kernels* kernels : {FOR_EACH_ISA(LIST)})
    if (has_features(kernels->name) && (!kernels->try_tiles || succeeds(kernels->try_tiles))) all.push_back(kernels);
#undef LIST
  const auto is_pairs = [](const Kernels* kernels) { return kernels->name == std::string("avx512bf16"); };
  const auto pairs = std::find_if(all.begin(), all.end(), is_pairs);
  if (!FAST_PAIRS && all.end() - pairs > 1) std::iter_swap(pairs, pairs + 1);
  return all;
}

const std::vector<const Kernels*>& runnable() {
  static const std::vector<const Kernels*> all = find_runnable();
  return all;
}

const Kernels* chosen = nullptr;

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable()) names.push_back(kernels->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* kernels : runnable())
    if (kernels->name == name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("no kernels for the instruction set " + name);
}

// Whether float32 products of the chosen kernels are faster than those of MKL, which torch uses. MKL does not use
// AVX-512 on AMD's processors. docs/results.md has the speed of both on Zen 5.
bool prefers_linear() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__builtin_cpu_is("amd") || chosen->lanes < 8 || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 0xf) + (a >> 20 & 0xff) >= 0x19;  // Zen 3 and newer
#else
  return false;
#endif
}

// Reads the numbers that describe a call, with bounds checks.
class Numbers {
 public:
  explicit Numbers(nb::handle list) : list_(PySequence_Fast(list.ptr(), "a call is described by a list of numbers")) {
    if (!list_) throw nb::python_error();
    size_ = PySequence_Size(list_);
  }
  Numbers(const Numbers&) = delete;
  ~Numbers() { Py_DECREF(list_); }

  bool done() const { return at_ == size_; }

  int64_t next() {
    if (done()) throw std::out_of_range("the description of a call ends too early");
    const long long x = PyLong_AsLongLong(item());
    if (x == -1 && PyErr_Occurred()) throw nb::python_error();
    return x;
  }
  // Returns the next number, which must lie within bounds.
  int64_t next(int64_t min, int64_t max, const char* name) {
    const int64_t x = next();
    if (x < min || x > max)
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(x) + "; the kernels accept " +
                                  std::to_string(min) + " to " + std::to_string(max));
    return x;
  }
  template <class T>
  T* address() {
    return reinterpret_cast<T*>(next());
  }
  Step::Norm norm() {
    Step::Norm n;
    n.weight = address<float>();
    n.bias = address<float>();
    return n;
  }
  Step::Layer layer() {
    Step::Layer l;
    l.weight = address<float>();
    l.scales = address<float>();
    l.bias = address<float>();
    return l;
  }
  float factor() {
    if (done()) throw std::out_of_range("a call must have five factors");
    const double x = PyFloat_AsDouble(item());
    if (x == -1 && PyErr_Occurred()) throw nb::python_error();
    return float(x);
  }

 private:
  // Returns the next item, a borrowed reference. The stable ABI lacks PySequence_Fast_GET_ITEM.
  PyObject* item() {
#ifdef Py_LIMITED_API
    return PyList_Check(list_) ? PyList_GetItem(list_, at_++) : PyTuple_GetItem(list_, at_++);
#else
    return PySequence_Fast_GET_ITEM(list_, at_++);
#endif
  }

  PyObject* list_;
  Py_ssize_t size_ = 0, at_ = 0;
};

// A tensor of a call, and the types it may have.
struct Slot {
  View* view;
  unsigned types;
};

constexpr unsigned one_of(Type type) { return 1u << unsigned(type); }
constexpr unsigned FLOAT = one_of(Type::float32), WHOLE = one_of(Type::int64), BOOLEAN = one_of(Type::boolean);
constexpr unsigned REAL = FLOAT | one_of(Type::bfloat16) | one_of(Type::float16);
constexpr unsigned STORED = REAL | one_of(Type::int8);

// Finds a tensor of a call by its id. Ids follow the order in abi.h. Tensors in the first list have the ids
// 100, 101, …, tensors in the second list 200, 201, …
Slot slot(Problem& p, int64_t name) {
#define SLOT(name, types) {&p.name, types},
#define LIST(name, types, size) {p.name, types},
#define SIZE(name, types, size) size,
  const Slot single[] = {TENSORS(SLOT)}, lists[] = {TENSOR_LISTS(LIST)};
  const int64_t sizes[] = {TENSOR_LISTS(SIZE)};
#undef SLOT
#undef LIST
#undef SIZE
  if (name >= 0 && name < int64_t(sizeof single / sizeof *single)) return single[name];
  const int64_t list = name / 100 - 1, at = name % 100;
  if (name < 0 || list < 0 || list >= int64_t(sizeof lists / sizeof *lists) || at >= sizes[list])
    throw std::out_of_range("a call has too many tensors of one kind");
  return {lists[list].view + at, lists[list].types};
}

// Exports the tables of abi.h for fused.py.
nb::dict enumerate(const std::vector<std::string>& names) {
  nb::dict numbers;
  for (size_t i = 0; i < names.size(); ++i) numbers[names[i].c_str()] = i;
  return numbers;
}

nb::dict slots() {
#define NAME(name, ...) #name,
  nb::dict numbers = enumerate({TENSORS(NAME)});
#undef NAME
  int first = 0;
#define LIST(name, types, size) \
  first += 100;                 \
  for (int i = 0; i < size; ++i) numbers[(#name + std::to_string(i)).c_str()] = first + i;
  TENSOR_LISTS(LIST)
#undef LIST
  return numbers;
}

Problem read(nb::handle described, nb::handle given) {
  constexpr int64_t LARGE = int64_t(1) << 40;  // upper limit for sizes and indices
  Numbers numbers(described), factors(given);
  Problem p;
  p.axes = int(numbers.next(1, MAX_LEAD, "the number of leading axes"));
  for (int i = 0; i < p.axes; ++i) p.lead[i] = numbers.next(0, LARGE, "a leading axis");
  for (int64_t* size : {&p.queries, &p.keys, &p.width, &p.value_width, &p.all_queries})
    *size = numbers.next(0, LARGE, "a size");
  p.first_key = numbers.next(0, LARGE, "the first key");
#define ONE(...) +1
  p.family = Family(numbers.next(0, SCORES(ONE) - 1, "the family of the score"));
  p.normalizer = Normalizer(numbers.next(0, NORMALIZERS(ONE) - 1, "the normalizer"));
  p.counts = numbers.next() != 0;
  p.threshold = uint32_t(numbers.next(0, UINT32_MAX, "the dropout threshold"));
  p.segments = numbers.next(1, LARGE, "the number of segments");
  p.k = numbers.next(0, LARGE, "k");
  p.biases = int(numbers.next(0, MAX_BIASES, "the number of biases"));
  p.lines = int(numbers.next(0, MAX_LINES, "the number of relative biases"));
  p.terms = int(numbers.next(0, MAX_TERMS, "the number of mask terms"));
  for (float* factor : {&p.scale, &p.sharpness, &p.softcap, &p.offset, &p.kept}) *factor = factors.factor();
  if (!factors.done()) throw std::out_of_range("a call must have five factors");
  while (!numbers.done()) {
    const int64_t name = numbers.next(), type = numbers.next(1, TYPES(ONE) - 1, "the type of a tensor");
#undef ONE
    const Slot at = slot(p, name);
    if (!(at.types & one_of(Type(type))))
      throw std::invalid_argument("tensor " + std::to_string(name) + " of a call cannot be of type " +
                                  std::to_string(type));
    View& view = *at.view;
    view.type = Type(type);
    view.segment = numbers.next();
    view.data = reinterpret_cast<char*>(numbers.next());
    int64_t sizes[MAX_LEAD + 2];
    for (int i = 0; i < p.axes + 2; ++i) sizes[i] = numbers.next();
    for (int i = 0; i < p.axes + 2; ++i) {
      const int64_t stride = numbers.next();
      (i < p.axes ? view.lead[i] : i == p.axes ? view.row : view.column) = sizes[i] == 1 ? 0 : stride;
    }
  }
  if (p.keys && ((p.key.type == Type::int8 && !p.key_scale) || (p.value.type == Type::int8 && !p.value_scale)))
    throw std::invalid_argument("int8 keys and values need scales");
  // an axis of size 1 has no meaningful stride; with stride 1, rows can be read in place
  if (p.width == 1) p.query.column = p.key.column = 1;
  if (p.value_width == 1) p.value.column = p.grad.column = 1;
  return p;
}

template <bool (*Kernels::*kernel)(const Problem&, int)>
bool call(nb::handle numbers, nb::handle factors, int threads) {
  const Problem p = read(numbers, factors);
  nb::gil_scoped_release release;
  return (chosen->*kernel)(p, threads);
}

// A call that is decoded once and run many times, with new addresses for some of its tensors.
class Prepared {
 public:
  Prepared(nb::handle numbers, nb::handle factors, const std::vector<int64_t>& names)
      : problem_(read(numbers, factors)) {
    for (int64_t name : names)
      offsets_.push_back(reinterpret_cast<char*>(slot(problem_, name).view) - reinterpret_cast<char*>(&problem_));
  }

  template <bool (*Kernels::*kernel)(const Problem&, int)>
  bool run(nb::handle addresses, int threads) const {
    Problem p = problem_;  // other threads may run the same call
    Numbers numbers(addresses);
    for (ptrdiff_t offset : offsets_)
      reinterpret_cast<View*>(reinterpret_cast<char*>(&p) + offset)->data = reinterpret_cast<char*>(numbers.next());
    if (!numbers.done()) throw std::out_of_range("a prepared call received too many addresses");
    nb::gil_scoped_release release;
    return (chosen->*kernel)(p, threads);
  }

  const Problem& problem() const { return problem_; }
  const std::vector<ptrdiff_t>& offsets() const { return offsets_; }

 private:
  Problem problem_;
  std::vector<ptrdiff_t> offsets_;
};

// x, y, out: address, and whether the type is bfloat16; the address of x may be 0. size: number of elements. See
// dropout.h.
using Address = std::tuple<int64_t, bool>;
void drop(int64_t kind, Address x, Address y, Address out, int64_t size, uint32_t seed, uint32_t other,
          uint32_t threshold, double kept, int threads) {
  const auto decode = [](const Address& address) -> Drop::Numbers {
    return {reinterpret_cast<char*>(std::get<0>(address)), std::get<1>(address)};
  };
  const Drop d = {Drop::Kind(kind), decode(x), decode(y), decode(out), size, seed, other, threshold, float(kept)};
  nb::gil_scoped_release release;
  chosen->dropout(d, threads);
}

// Takes the addresses and sizes of `Linear`; scales is 0 for float32, and bias may be 0. See linear.h.
void multiply(int64_t x, int64_t weight, int64_t scales, int64_t bias, int64_t out, int64_t rows, int64_t depth,
              int64_t columns, bool transposed, int threads) {
  const Linear l = {reinterpret_cast<const float*>(x),
                    reinterpret_cast<const void*>(weight),
                    reinterpret_cast<const float*>(scales),
                    reinterpret_cast<const float*>(bias),
                    reinterpret_cast<float*>(out),
                    rows,
                    depth,
                    columns,
                    transposed};
  nb::gil_scoped_release release;
  (scales ? chosen->linear_int8 : chosen->linear)(l, threads);
}

// Takes the addresses and sizes of `Best`. See vocabulary.h.
void best(int64_t logits, int64_t values, int64_t tokens, int64_t rows, int64_t columns, int64_t first, int64_t k,
          int threads) {
  const Best b = {reinterpret_cast<const float*>(logits),
                  reinterpret_cast<float*>(values),
                  reinterpret_cast<int64_t*>(tokens),
                  rows,
                  columns,
                  first,
                  k};
  nb::gil_scoped_release release;
  chosen->best(b, threads);
}

// Takes the fields of `Step` as numbers, in order. Returns whether the result is finite.
bool step(nb::handle described, double eps, int threads) {
  Numbers numbers(described);
  const auto real = [&] { return numbers.address<float>(); };
  const auto whole = [&] { return numbers.address<const int64_t>(); };
  const auto norm = [&] { return numbers.norm(); };
  const auto layer = [&] { return numbers.layer(); };
  Step s;
  for (int64_t* size : {&s.rows, &s.width, &s.groups, &s.per_group, &s.head, &s.inner, &s.vocabulary, &s.length,
                        &s.capacity, &s.sources, &s.slots, &s.keys})
    *size = numbers.next(0, int64_t(1) << 40, "a size");
  s.index = whole();
  s.lengths = whole();
  s.x = real();
  s.logits = real();
  for (float** scratch : {&s.normed, &s.y, &s.projected, &s.attended, &s.hidden, &s.spread}) *scratch = real();
  s.norm_first = numbers.next() != 0;
  s.eps = float(eps);
  s.layers = numbers.next(1, 1 << 16, "the number of layers");
  std::vector<Step::Block> blocks(static_cast<size_t>(s.layers));
  for (Step::Block& b : blocks) {
    for (float** data : {&b.cache, &b.source, &b.queries}) *data = real();
    for (Step::Norm& n : b.norms) n = norm();
    for (Step::Layer* l : {&b.in_proj, &b.out_proj, &b.query, &b.cross_out, &b.ffn_in, &b.ffn_out}) *l = layer();
  }
  s.blocks = blocks.data();
  s.norm = norm();
  s.output = layer();
  if (!numbers.done()) throw std::out_of_range("a decoding step has too many numbers");
  nb::gil_scoped_release release;
  return chosen->step(s, threads);
}

// Reads the fields of `Stack` in order, then those of its blocks.
Stack read_stack(Numbers& numbers, std::vector<Stack::Block>& blocks, double eps) {
  Stack s;
  for (int64_t* size : {&s.width, &s.groups, &s.per_group, &s.head, &s.inner, &s.layers})
    *size = numbers.next(1, int64_t(1) << 40, "a size");
  s.norm_first = numbers.next() != 0;
  s.eps = float(eps);
  s.first = numbers.norm();
  s.last = numbers.norm();
  blocks.resize(static_cast<size_t>(s.layers));
  for (Stack::Block& b : blocks) {
    for (Step::Norm& n : b.norms) n = numbers.norm();
    for (Step::Layer* l : {&b.in_proj, &b.out_proj, &b.query, &b.source, &b.cross_out, &b.ffn_in, &b.ffn_out})
      *l = numbers.layer();
  }
  return s;
}

// described: the fields of `TransformerModel` as numbers, in order. factors: eps and the embedding scale, of the
// encoder and of the decoder. chosen_by: size, n_best, suppressed, end, unknown and recorded of `SearchOptions`.
void start_search(Search* self, nb::handle described, std::tuple<double, double, double, double> factors,
                  nb::handle chosen_by, double length_penalty, double prune_threshold, std::vector<int64_t> start,
                  const std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t>>& sentences, int threads) {
  Numbers numbers(described), choices(chosen_by);
  TransformerModel m;
  m.encoder = read_stack(numbers, m.encoder_blocks, std::get<0>(factors));
  m.decoder = read_stack(numbers, m.decoder_blocks, std::get<2>(factors));
  m.source = {numbers.address<float>(), numbers.address<float>(), float(std::get<1>(factors))};
  m.target = {numbers.address<float>(), numbers.address<float>(), float(std::get<3>(factors))};
  m.output = numbers.layer();
  m.vocabulary = numbers.next(1, int64_t(1) << 40, "the vocabulary");
  if (!numbers.done()) throw std::out_of_range("a Transformer has too many numbers");
  SearchOptions o;
  for (int64_t* option : {&o.size, &o.n_best, &o.suppressed, &o.end, &o.unknown, &o.recorded}) *option = choices.next();
  o.length_penalty = length_penalty;
  o.prune_threshold = prune_threshold;
  o.start = std::move(start);
  std::vector<SearchSentence> all;
  for (const auto& [tokens, limit, max_unknown] : sentences) all.push_back({tokens, limit, max_unknown});
  new (self) Search(*chosen, std::move(m), std::move(o), all, threads);
}

// The results of a search: sentence, log probability, whether it is finished, tokens, and recorded weights as bytes.
nb::list results(const Search& search) {
  nb::list all;
  for (const SearchResult& r : search.results())
    all.append(nb::make_tuple(r.sentence, r.total, r.finished, r.tokens, r.source_length,
                              nb::bytearray(r.weights.data(), r.weights.size() * sizeof(float))));
  return all;
}

// Measures the peak throughput of multiplications and additions on `threads` threads, in FLOP/s.
double peak(int threads) {
  struct Run {
    double flop = 0, seconds = 0;
  };
  std::vector<Run> runs(static_cast<size_t>(threads));
  nb::gil_scoped_release release;
  parallel(
      threads, threads,
      [](void* context, int64_t i) {
        Run& run = (*static_cast<std::vector<Run>*>(context))[static_cast<size_t>(i)];
        const auto begun = std::chrono::steady_clock::now();
        while (run.seconds < 0.02) {
          run.flop += chosen->peak();
          run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        }
      },
      &runs);
  double total = 0;
  for (const Run& run : runs) total += run.flop / run.seconds;
  return total;
}

}  // namespace
}  // namespace regard

NB_MODULE(_kernels, m) {
  using namespace regard;
  m.doc() = "regard's kernels: see kernels/ in the sources";
  m.def("available", &available, "The instruction sets that this machine can run, best first.");
  m.def("features", &features, nb::arg("name"), "The processor features that an instruction set requires.");
  m.def("use", &use, nb::arg("name"));
  m.def("lanes", [] { return chosen->lanes; });
  m.def("tile_keys", [] { return chosen->tile_keys; });
  m.def("few_rows", [](bool single_query) { return single_query ? chosen->max_few : chosen->few; });
  m.def("peak", &peak, nb::arg("threads"));
  m.def("forward", &call<&Kernels::forward>);
  m.def("backward", &call<&Kernels::backward>);
  nb::class_<Prepared>(m, "Prepared")
      .def(nb::init<nb::handle, nb::handle, const std::vector<int64_t>&>())
      .def("forward", &Prepared::run<&Kernels::forward>)
      .def("backward", &Prepared::run<&Kernels::backward>);
  nb::class_<Calls>(m, "Calls")
      .def(nb::init<const nb::dict&>())
      .def("clear", &Calls::clear)
      .def(
          "add",
          [](Calls& calls, nb::handle query, nb::handle key, nb::handle value, nb::handle score, nb::handle mask,
             nb::handle normalize, const Prepared& call, nb::handle prepared, nb::handle shapes) {
            calls.add(query, key, value, score, mask, normalize, call.problem(), call.offsets(), prepared, shapes,
                      chosen->lanes);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def(
          "run",
          [](const Calls& calls, nb::handle query, nb::handle key, nb::handle value, nb::handle score, nb::handle mask,
             nb::handle normalize,
             bool need_tau) { return calls.run(chosen, query, key, value, score, mask, normalize, need_tau); },
          nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::arg());
  m.def("weights", &call<&Kernels::weights>);
  m.def("entropy", &call<&Kernels::entropy>);
  m.def("dropout", &drop);
  m.def("linear", &multiply);
  m.def("prefers_linear", &prefers_linear);
  m.def("best", &best);
  m.def("step", &step);
  nb::class_<Search>(m, "Search")
      .def("__init__", &start_search)
      .def("run", &Search::run, nb::call_guard<nb::gil_scoped_release>())
      .def("is_valid", &Search::is_valid)
      .def("results", &results);
  m.def("topk", &call<&Kernels::topk>);
  m.def("sums", &call<&Kernels::sums>);
#define NAME(name, ...) #name,
  m.attr("NORMALIZERS") = enumerate({NORMALIZERS(NAME)});
  m.attr("SCORES") = enumerate({SCORES(NAME)});
  m.attr("TYPES") = enumerate({TYPES(NAME)});
#undef NAME
  m.attr("SLOTS") = slots();
  m.attr("MATCHES") = MATCHES;
  nb::set_leak_warnings(false);  // prepared calls are cached until the process ends
  use(available().front());
}
