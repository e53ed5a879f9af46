// The first of an adapter's two products: a row times the rows of A.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

template <bool Floats>
PL_INLINE vf adapter_values(const uint8_t* p, int64_t index) {
  if constexpr (Floats) return load(reinterpret_cast<const float*>(p) + index);
  return load_bf16(reinterpret_cast<const uint16_t*>(p) + index);
}

// Four rows at a time, each by two chains of sums where there are registers for them: a row's sums follow from the
// row alone.
template <bool Floats>
static void shrink_as(const float* x, int64_t n, const uint8_t* a, int64_t rank, const float* scales, float factor,
                      float* sums) {
  // of 16 columns of four rows
  constexpr int64_t bytes = 4 * 16 * (Floats ? 4 : 2);
  constexpr int other = PL_LEVEL >= 2 ? 4 : 0;
  const int64_t whole = n / 32 * 32;
  for (int64_t k = 0; k < rank; k += 4) {
    vf acc[8];
    PL_UNROLL
    for (int i = 0; i < 8; ++i) acc[i] = zero();
    int64_t d = 0;
    for (; d < whole; d += 32, a += 2 * bytes) {
      const vf x0 = load(x + d), x1 = load(x + d + 16);
      for (int64_t line = 0; line < 2 * bytes; line += 64) prefetch(a + kAhead + line);
      PL_UNROLL
      for (int i = 0; i < 4; ++i) {
        acc[i] = fma(x0, adapter_values<Floats>(a, i * 16), acc[i]);
        acc[other + i] = fma(x1, adapter_values<Floats>(a, 64 + i * 16), acc[other + i]);
      }
    }
    for (; d < n; d += 16, a += bytes) {
      const vf x0 = load_n(x + d, n - d < 16 ? int(n - d) : 16);
      PL_UNROLL
      for (int i = 0; i < 4; ++i) acc[i] = fma(x0, adapter_values<Floats>(a, i * 16), acc[i]);
    }
    if (other) {
      PL_UNROLL
      for (int i = 0; i < 4; ++i) acc[i] = add(acc[i], acc[4 + i]);
    }
    float found[4];
    hsum_four(acc, found);
    PL_UNROLL
    for (int i = 0; i < 4; ++i) sums[k + i] = factor * scales[k + i] * found[i];
  }
}

static void shrink(const float* x, int64_t n, const uint8_t* a, bool floats, int64_t rank, const float* scales,
                   float factor, float* sums) {
  if (floats)
    shrink_as<true>(x, n, a, rank, scales, factor, sums);
  else
    shrink_as<false>(x, n, a, rank, scales, factor, sums);
}

}  // namespace PL_NAMESPACE
