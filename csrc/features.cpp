#include "features.h"

#include <chrono>
#include <cstdlib>
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

std::vector<const Kernels*> kernels_for(const Processor& p) {
  std::vector<const Kernels*> found;
#ifdef PL_X86
  // cpuid says what the processor could do, the states what the system lets it do: registers that it
  // does not save across a switch of threads fault when they are used
  const uint64_t states = has(p.leaf1_ecx, 27) ? p.states : 0;
  const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6;
  const bool avx2 =
      ymm && has(p.leaf1_ecx, 28) && has(p.leaf1_ecx, 12) && has(p.leaf1_ecx, 29) && has(p.leaf7_ebx, 5);
  const bool avx512 = avx2 && zmm && has(p.leaf7_ebx, 16) && has(p.leaf7_ebx, 17) && has(p.leaf7_ebx, 30) &&
                      has(p.leaf7_ebx, 31);
  const bool vnni = avx512 && has(p.leaf7_ecx, 11);
#ifdef PL_STAND_IN
  if (avx2) found.push_back(kernels_avxvnni());
#else
  if (vnni && has(p.leaf7_1_eax, 5)) found.push_back(kernels_avx512bf16());
  if (vnni) found.push_back(kernels_avx512());
  if (avx512) found.push_back(kernels_avx512bw());
#ifdef PL_AVXVNNI
  if (avx2 && has(p.leaf7_1_eax, 4)) found.push_back(kernels_avxvnni());
#endif
  if (avx2) found.push_back(kernels_avx2());
#endif
#else
  (void)p;
#endif
  found.push_back(kernels_portable());
  return found;
}

namespace {

std::vector<const Kernels*> runnable_kernels() {
  Processor p;
#ifdef PL_X86
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  p = {one.c, seven.b, seven.c, cpuid(7, 1).a, 0};
  // xgetbv itself faults without OSXSAVE
  if (has(p.leaf1_ecx, 27)) p.states = saved_states();
#endif
  return kernels_for(p);
}

// throws std::invalid_argument naming what there is
size_t find_kernels(const std::vector<const Kernels*>& found, const std::string& name, const char* whose) {
  std::string names;
  for (size_t i = 0; i < found.size(); ++i) {
    if (name == found[i]->name) return i;
    if (i) names += ", ";
    names += found[i]->name;
  }
  throw std::invalid_argument(whose + ("instruction set '" + name) + "' does not run here; these do: " + names);
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found = runnable_kernels();
  const char* most = std::getenv("PACELINE_ISA");
  // an empty value is how a shell or a makefile passes on that there is none
  if (most && *most) found.erase(found.begin(), found.begin() + ptrdiff_t(find_kernels(found, most, "PACELINE_ISA: ")));
  return found;
}

const Kernels* choose_kernels(const char* name) {
  const std::vector<const Kernels*> found = usable_kernels();
  return name ? found[find_kernels(found, name, "")] : found.front();
}

double clock_hz() {
  double best = 0;
#if defined(__x86_64__) || defined(__aarch64__)
  using Clock = std::chrono::steady_clock;
  constexpr int kTurns = 20, kLoops = 10000, kAdds = 100;
  for (int turn = 0; turn < kTurns; ++turn) {
    // each waits for the one before, a cycle on every processor. Of registers: some processors add
    // constants before anything is issued
    uint64_t x = uint64_t(turn), y = 3;
    const auto began = Clock::now();
    for (int i = 0; i < kLoops; ++i) {
#ifdef __x86_64__
      __asm__ volatile(".rept 100\n\taddq %1, %0\n\t.endr" : "+r"(x) : "r"(y) : "cc");
#else
      __asm__ volatile(".rept 100\n\tadd %0, %0, %1\n\t.endr" : "+r"(x) : "r"(y));
#endif
    }
    const double rate = kLoops * double(kAdds) / std::chrono::duration<double>(Clock::now() - began).count();
    if (rate > best) best = rate;
  }
#endif
  return best;
}

}  // namespace paceline
