// Shared by the drivers sanitize.cpp, sanitize_decoding.cpp and sanitize_search.cpp: the kernels of one instruction set,
// without Python and torch, and random numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <new>
#include <thread>

#include "abi.h"

#define TABLE_(isa) kernels_##isa
#define TABLE(isa) TABLE_(isa)

namespace regard {
extern const Kernels TABLE(ISA);
}

inline const regard::Kernels& kernels = regard::TABLE(ISA);
inline constexpr double INFINITE = HUGE_VAL;
inline int64_t left = -1;       // number of allocations that the kernels may still make; unlimited if negative
inline bool backwards = false;  // reverse the order of the items, which must not matter

struct Dice {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t in(int64_t least, int64_t most) { return least + int64_t(next() % uint64_t(most - least + 1)); }
  bool chance(double p) { return double(next() >> 11) * 0x1p-53 < p; }
  double normal() {
    const double u = (double(next() >> 11) + 1) * 0x1p-53, v = double(next() >> 11) * 0x1p-53;
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }
  int64_t of(std::initializer_list<int64_t> list) { return list.begin()[in(0, int64_t(list.size()) - 1)]; }
};

// The hash in dropout.h.
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Let each allocation in a kernel fail in turn. Returns the number of failed allocations, or -1 if the kernel never
// succeeds. Each attempt runs in a new thread, which has no scratch memory yet.
template <class Kernel>
int64_t exhaust(Kernel kernel) {
  for (int64_t allowed = 0; allowed < 100; ++allowed) {
    bool done = false;
    left = allowed;
    std::thread([&] {
      try {
        kernel();
        done = true;
      } catch (const std::bad_alloc&) {
      }
    }).join();
    left = -1;
    if (done) return allowed;
  }
  return -1;
}

enum class Mode { plain, poison, exhaust };

// Checks linear layers, the most probable tokens, dropout and decoding steps on random problems. Returns the number of
// failed rounds, and adds the number of failed allocations to `refused`.
int64_t check_decoding(int64_t rounds, Mode mode, int64_t& refused);

// Checks beam searches in the same way.
int64_t check_search(int64_t rounds, Mode mode, int64_t& refused);
