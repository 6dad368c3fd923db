// The Python side of the kernels. Tensors come as numbers (addresses, sizes, strides), so that nothing here
// depends on torch; fused.py writes them down in the order in which they are read here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "isas.h"
#include "problem.h"

namespace nb = nanobind;

namespace regard {

#define DECLARE(isa) extern const Kernels kernels_##isa;
FOR_EACH_ISA(DECLARE)
#undef DECLARE

namespace {

bool runs(const std::string& name) {
#if defined(__x86_64__)
  if (name == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return true;
}

// The instruction sets that were built, best first.
const std::vector<const Kernels*>& built() {
#define LIST(isa) &kernels_##isa,
  static const std::vector<const Kernels*> all = {FOR_EACH_ISA(LIST)};
#undef LIST
  return all;
}

const Kernels* chosen = nullptr;

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Kernels* kernels : built())
    if (runs(kernels->name)) names.push_back(kernels->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* kernels : built())
    if (kernels->name == name && runs(name)) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("no kernels for the instruction set " + name);
}

// The tensors a call can have; the lists of several begin at hundreds.
View* slot(Problem& p, int64_t name) {
  View* const single[] = {&p.query,      &p.key,     &p.value, &p.vector,  &p.sink,     &p.seed,
                          &p.row,        &p.head,    &p.tau,   &p.output,  &p.grad,     &p.found,
                          &p.found_keys, &p.d_query, &p.d_key, &p.d_value, &p.d_vector, &p.d_sink};
  View* const several[] = {p.bias, p.line, p.start, p.stop, p.allowed, p.d_bias, p.d_line};
  const int64_t room[] = {MAX_BIASES, MAX_LINES, MAX_TERMS, MAX_TERMS, MAX_TERMS, MAX_BIASES, MAX_LINES};
  if (name < int64_t(sizeof single / sizeof *single)) return single[name];
  const int64_t list = name / 100 - 1, at = name % 100;
  if (list < 0 || list >= 7 || at >= room[list]) throw std::out_of_range("too many tensors of a kind");
  return several[list] + at;
}

Problem read(const std::vector<int64_t>& numbers, const std::vector<double>& factors) {
  if (numbers.size() < 20 || factors.size() != 5) throw std::out_of_range("a problem is not whole");
  Problem p;
  const int64_t* at = numbers.data();
  const int64_t* const end = at + numbers.size();
  p.axes = int(*at++);
  if (p.axes > MAX_LEAD) throw std::out_of_range("too many leading axes");
  for (int i = 0; i < p.axes; ++i) p.lead[i] = *at++;
  for (int64_t* size : {&p.queries, &p.keys, &p.width, &p.value_width, &p.all_queries, &p.first_key}) *size = *at++;
  p.family = Family(*at++);
  p.normalizer = Normalizer(*at++);
  p.counts = *at++ != 0;
  p.threshold = uint32_t(*at++);
  p.segments = *at++;
  p.most = *at++;
  p.biases = int(*at++);
  p.lines = int(*at++);
  p.terms = int(*at++);
  p.scale = float(factors[0]);
  p.sharpness = float(factors[1]);
  p.softcap = float(factors[2]);
  p.offset = float(factors[3]);
  p.kept = float(factors[4]);
  while (at < end) {
    if (end - at < 4 + 2 * (p.axes + 2)) throw std::out_of_range("a tensor is not whole");
    View& view = *slot(p, *at++);
    view.type = Type(*at++);
    view.segment = *at++;
    view.data = reinterpret_cast<char*>(*at++);
    const int64_t *sizes = at, *strides = at + p.axes + 2;
    for (int i = 0; i < p.axes; ++i) view.lead[i] = sizes[i] == 1 ? 0 : strides[i];
    view.row = sizes[p.axes] == 1 ? 0 : strides[p.axes];
    view.column = sizes[p.axes + 1] == 1 ? 0 : strides[p.axes + 1];
    at += 2 * (p.axes + 2);
  }
  // a width of one has no stride worth telling, and rows of it can be read in place
  if (p.width == 1) p.query.column = p.key.column = 1;
  if (p.value_width == 1) p.value.column = p.grad.column = 1;
  return p;
}

template <bool (*Kernels::*kernel)(const Problem&, int)>
bool call(const std::vector<int64_t>& numbers, const std::vector<double>& factors, int threads) {
  const Problem p = read(numbers, factors);
  nb::gil_scoped_release release;
  return (chosen->*kernel)(p, threads);
}

// Addresses (x may be 0), and how many numbers each; see dropout.h.
void drop(int64_t kind, int64_t x, int64_t y, int64_t out, int64_t size, uint32_t seed, uint32_t other,
          uint32_t threshold, double kept, int threads) {
  const Drop d = {Drop::Kind(kind),
                  reinterpret_cast<const float*>(x),
                  reinterpret_cast<const float*>(y),
                  reinterpret_cast<float*>(out),
                  size,
                  seed,
                  other,
                  threshold,
                  float(kept)};
  nb::gil_scoped_release release;
  chosen->dropout(d, threads);
}

// FLOP per second of multiplications and additions alone, on this many threads at once.
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
  m.def("use", &use, nb::arg("name"));
  m.def("lanes", [] { return chosen->lanes; });
  m.def("peak", &peak, nb::arg("threads"));
  m.def("forward", &call<&Kernels::forward>);
  m.def("backward", &call<&Kernels::backward>);
  m.def("weights", &call<&Kernels::weights>);
  m.def("entropy", &call<&Kernels::entropy>);
  m.def("dropout", &drop);
  m.def("top", &call<&Kernels::top>);
  use(available().front());
}
