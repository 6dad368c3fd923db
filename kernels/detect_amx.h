// Whether this process can use AMX. Compiled for any processor.
#pragma once

#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace regard {
namespace {

// Whether the processor multiplies tiles of bfloat16, 8 tiles of 16 rows of 64 bytes.
[[maybe_unused]] bool processor_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned TILE = 1u << 24, BF16 = 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILE) || !(d & BF16)) return false;
  return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) >= 16;
}

// Whether the system saves the tiles of a thread, and lets this process use them. Linux grants this on request, for
// all threads.
[[maybe_unused]] bool system_allows_amx() {
#ifdef __linux__
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr unsigned TILES = 3u << 17;
  if ((a & TILES) != TILES) return false;
  constexpr long GET_PERMISSION = 0x1022, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned long allowed = 0;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 &&
         syscall(SYS_arch_prctl, GET_PERMISSION, &allowed) == 0 && (allowed >> TILE_DATA & 1);
#else
  return false;
#endif
}

[[maybe_unused]] bool has_amx() {
  static const bool has = processor_has_amx() && system_allows_amx();
  return has;
}

thread_local sigjmp_buf before_trial;
thread_local volatile sig_atomic_t trying = 0;

// Calls a function that may raise SIGILL, which then counts as false: some virtual machines report AMX, and permit it,
// but cannot run it.
bool succeeds(bool (*trial)()) {
  struct sigaction action = {}, previous;
  action.sa_handler = [](int) {
    if (trying) siglongjmp(before_trial, 1);
    signal(SIGILL, SIG_DFL);  // an error of another thread: its instruction runs again and ends the process
  };
  if (sigaction(SIGILL, &action, &previous)) return false;
  trying = 1;
  const bool success = sigsetjmp(before_trial, 1) == 0 && trial();
  trying = 0;
  sigaction(SIGILL, &previous, nullptr);
  return success;
}

}  // namespace
}  // namespace regard
