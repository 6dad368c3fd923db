// The backward pass for one instruction set. Compiled once per instruction set, with ISA defined as its name.
#include "backward.h"

namespace regard {
namespace ISA {

bool backward(const Problem& p, int threads) {
#define CASE(name, Policy) \
  case Normalizer::name: return backward_all<Policy>(p, threads);
  switch (p.normalizer) { NORMALIZERS(CASE) }
#undef CASE
  return false;
}

}  // namespace ISA
}  // namespace regard
