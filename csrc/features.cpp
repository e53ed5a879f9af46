#include "features.h"

#include <stdexcept>

#ifdef PL_X86
#include <cpuid.h>
#endif

namespace paceline {
namespace {

#ifdef PL_X86
struct Registers { unsigned a = 0, b = 0, c = 0, d = 0; };

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

// which register states the operating system saves; needs OSXSAVE
uint64_t saved_states() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool has(unsigned word, int bit) { return (word >> bit) & 1u; }
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#ifdef PL_X86
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
  // cpuid says what the processor could do, xgetbv what the system lets it do
  const uint64_t states = has(one.c, 27) ? saved_states() : 0;
  const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6;
  const bool avx2 = ymm && has(one.c, 28) && has(one.c, 12) && has(one.c, 29) && has(seven.b, 5);
  const bool avx512 = avx2 && zmm && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) &&
                      has(seven.b, 31) && has(seven.c, 11);
  if (avx512 && has(more.a, 5)) found.push_back(kernels_avx512bf16());
  if (avx512) found.push_back(kernels_avx512());
  if (avx2) found.push_back(kernels_avx2());
#endif
  found.push_back(kernels_portable());
  return found;
}

const Kernels* choose_kernels(const char* name) {
  const std::vector<const Kernels*> found = usable_kernels();
  if (!name) return found.front();
  std::string names;
  for (const Kernels* kernels : found) {
    if (std::string(name) == kernels->name) return kernels;
    if (!names.empty()) names += ", ";
    names += kernels->name;
  }
  throw std::invalid_argument("instruction set '" + std::string(name) + "' does not run here; these do: " + names);
}

}  // namespace paceline
