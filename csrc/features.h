// Which variants of the kernels this machine runs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {

// What the choice depends on: words of cpuid, and the register states that the system saves (XCR0).
struct Processor {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_1_eax = 0;
  uint64_t states = 0;
};

// of a processor, best first; the portable one is always last
std::vector<const Kernels*> kernels_for(const Processor& processor);
// of this one; where the environment has PACELINE_ISA, that variant and those below it. Throws
// std::invalid_argument where it names one that does not run here
std::vector<const Kernels*> usable_kernels();
// by name, or the best for null; throws std::invalid_argument naming what there is
const Kernels* choose_kernels(const char* name);
// cycles a second of the processor that the calling thread runs on, measured, which takes some
// milliseconds; 0 where this is not known to measure it
double clock_hz();

}  // namespace paceline
