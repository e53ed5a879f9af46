// What the machine can do at most, by code that shares nothing with the kernels.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace paceline {

// A loop of products between registers, and how many multiply-adds a round of it has.
struct PeakLoop {
  void (*run)(int64_t rounds);
  int64_t products;
};

// The loop for a kind of weights on a variant; null where none says what the machine can do, as for
// plain C++, which is whatever the compiler makes of it.
const PeakLoop* peak_loop(const char* variant, Weights weights);

// Multiply-adds a second of all threads together, the best of a few rounds of milliseconds; 0 without a
// loop. The processor must have the variant's instructions.
double peak_rate(const char* variant, Weights weights, int threads);

// Seconds that the threads take to read the bytes together, the best of `repeat` times.
double read_seconds(const void* data, int64_t bytes, int threads, int repeat);

}  // namespace paceline
