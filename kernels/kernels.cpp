// All kernels of one instruction set, except the backward pass (instantiate_backward.cpp), which takes as long to
// compile as all the others combined. Both files are compiled once per instruction set, with ISA defined as its name.
#include "decode.h"
#include "dropout.h"
#include "forward.h"
#include "inspect.h"
#include "linear.h"
#include "single_query.h"
#include "vocabulary.h"

namespace regard {
namespace {

bool forward(const Problem& p, int threads) {
  if (p.normalizer == Normalizer::softmax)
    return is_single(p) ? forward_single(p, threads) : forward_softmax(p, threads);
#define CASE(name, Policy) \
  case Normalizer::name: return forward_all<Policy>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

bool weights(const Problem& p, int threads) {
#define CASE(name, Policy) \
  case Normalizer::name: return inspect_all<write_weights<Policy>>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

bool entropy(const Problem& p, int threads) {
#define CASE(name, Policy) \
  case Normalizer::name: return inspect_all<write_entropy<Policy>>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

bool topk(const Problem& p, int threads) {
#define CASE(name, Policy) \
  case Normalizer::name: return inspect_all<write_topk<Policy>>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

bool sums(const Problem& p, int threads) {
#define CASE(name, Policy) \
  case Normalizer::name: return inspect_all<write_sums<Policy>>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

}  // namespace
}  // namespace regard

#include "transformer.h"

namespace regard {
namespace {

// Runs only multiplications and additions, on data in the L1 cache.
double peak() {
  constexpr int R = tall(MAX_VECTORS), DEPTH = 1 << 14;
  alignas(64) float a[R] = {}, b[MAX_VECTORS * W] = {}, c[R * MAX_VECTORS * W];
  asm volatile("" : : "r"(a), "r"(b) : "memory");  // makes the compiler assume arbitrary contents
  tile<R, MAX_VECTORS, Walk::down>(a, 0, b, 0, c, MAX_VECTORS * W, DEPTH, false);
  asm volatile("" : : "r"(c) : "memory");
  return 2.0 * R * MAX_VECTORS * W * DEPTH;
}

}  // namespace

// Each instruction set has its own namespace, so that the compiled copies share no symbols.
namespace ISA {
bool backward(const Problem& p, int threads);  // instantiate_backward.cpp
}

#define NAME_(isa) #isa
#define NAME(isa) NAME_(isa)
#define TABLE_(isa) kernels_##isa
#define TABLE(isa) TABLE_(isa)
extern const Kernels TABLE(ISA);
const Kernels TABLE(ISA) = {NAME(ISA), W,       KEYS,   FEW,    MAX_FEW,   forward, ISA::backward,
                            weights,   entropy, topk,   sums,   dropout,   linear,  linear_int8,
                            best,      step,    encode, extend, try_tiles, peak};

}  // namespace regard
