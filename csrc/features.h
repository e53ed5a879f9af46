// Which variants of the kernels this machine runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace paceline {

// best first; the portable one is always last
std::vector<const Kernels*> usable_kernels();
// by name, or the best for null; throws std::invalid_argument naming what there is
const Kernels* choose_kernels(const char* name);

}  // namespace paceline
