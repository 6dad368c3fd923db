// All kernels for one instruction set: this file is compiled once for each, with ISA naming it.
#include "backward.h"
#include "decode.h"
#include "dropout.h"
#include "forward.h"
#include "look.h"
#include "single.h"

namespace regard {
namespace {

bool forward(const Problem& p, int threads) {
  switch (p.normalizer) {
    case Normalizer::softmax: return is_single(p) ? forward_single(p, threads) : forward_softmax(p, threads);
    case Normalizer::sigmoid: return forward_all<Sigmoid>(p, threads);
    case Normalizer::relu: return forward_all<Relu>(p, threads);
    case Normalizer::mean: return forward_all<Mean>(p, threads);
    case Normalizer::sparsemax: return forward_all<Sparsemax>(p, threads);
    case Normalizer::entmax15: return forward_all<Entmax15>(p, threads);
  }
  return false;
}

bool backward(const Problem& p, int threads) {
  switch (p.normalizer) {
    case Normalizer::softmax: return backward_all<Softmax>(p, threads);
    case Normalizer::sigmoid: return backward_all<Sigmoid>(p, threads);
    case Normalizer::relu: return backward_all<Relu>(p, threads);
    case Normalizer::mean: return backward_all<Mean>(p, threads);
    case Normalizer::sparsemax: return backward_all<Sparsemax>(p, threads);
    case Normalizer::entmax15: return backward_all<Entmax15>(p, threads);
  }
  return false;
}

#define LOOK(name, see)                                                        \
  bool name(const Problem& p, int threads) {                                   \
    switch (p.normalizer) {                                                    \
      case Normalizer::softmax: return look_all<see<Softmax>>(p, threads);     \
      case Normalizer::sigmoid: return look_all<see<Sigmoid>>(p, threads);     \
      case Normalizer::relu: return look_all<see<Relu>>(p, threads);           \
      case Normalizer::mean: return look_all<see<Mean>>(p, threads);           \
      case Normalizer::sparsemax: return look_all<see<Sparsemax>>(p, threads); \
      case Normalizer::entmax15: return look_all<see<Entmax15>>(p, threads);   \
    }                                                                          \
    return false;                                                              \
  }
LOOK(weights, see_all)
LOOK(entropy, see_entropy)
LOOK(top, see_top)
#undef LOOK

// Nothing but multiplications and additions, on numbers that stay in the first cache.
double peak() {
  constexpr int R = tall(MOST), DEPTH = 1 << 14;
  alignas(64) float a[R] = {}, b[MOST * W] = {}, c[R * MOST * W];
  asm volatile("" : : "r"(a), "r"(b) : "memory");  // for all the compiler knows, they hold anything
  tile<R, MOST, Walk::down>(a, 0, b, 0, c, MOST * W, DEPTH, false);
  asm volatile("" : : "r"(c) : "memory");
  return 2.0 * R * MOST * W * DEPTH;
}

}  // namespace

#define NAME_(isa) #isa
#define NAME(isa) NAME_(isa)
#define TABLE_(isa) kernels_##isa
#define TABLE(isa) TABLE_(isa)
extern const Kernels TABLE(ISA);
const Kernels TABLE(ISA) = {NAME(ISA), W, forward, backward, weights, entropy, top, dropout, peak};

}  // namespace regard
