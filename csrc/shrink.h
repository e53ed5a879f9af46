// The first of an adapter's two products: rows times the rows of A.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

// Values of 32 columns, see adapter.h.
template <bool Floats>
PL_INLINE void adapter_values(const uint8_t* p, vf& first, vf& second) {
  if constexpr (Floats) {
    first = load(reinterpret_cast<const float*>(p));
    second = load(reinterpret_cast<const float*>(p) + 16);
  } else {
    load_bf16_pair(p, first, second);
  }
}

// N rows times four rows of A, each by two chains of sums where there are registers for them.
template <int N, bool Floats>
static void shrink_tile(const ShrinkArgs& g, int row, int64_t k, const uint8_t* a) {
  constexpr int64_t bytes = kPanel * (Floats ? 4 : 2);
  constexpr int chains = PL_LEVEL >= 2 ? 2 : 1;
  vf acc[N * 4 * chains];
  PL_UNROLL
  for (int i = 0; i < N * 4 * chains; ++i) acc[i] = zero();
  for (int64_t d = 0; d < g.columns; d += kPanel, a += 4 * bytes) {
    vf x0[N], x1[N];
    const int64_t left = g.columns - d;
    PL_UNROLL
    for (int r = 0; r < N; ++r) {
      const float* x = g.x[row + r] + d;
      x0[r] = left >= 16 ? load(x) : load_n(x, int(left));
      x1[r] = left >= 32 ? load(x + 16) : left > 16 ? load_n(x + 16, int(left - 16)) : zero();
    }
    for (int64_t line = 0; line < 4 * bytes; line += 64) prefetch(a + kAhead + line);
    PL_UNROLL
    for (int i = 0; i < 4; ++i) {
      vf a0, a1;
      adapter_values<Floats>(a + i * bytes, a0, a1);
      PL_UNROLL
      for (int r = 0; r < N; ++r) {
        vf* sums = acc + 4 * chains * r + i;
        sums[0] = fma(x0[r], a0, sums[0]);
        sums[4 * (chains - 1)] = fma(x1[r], a1, sums[4 * (chains - 1)]);
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < N; ++r) {
    vf* sums = acc + 4 * chains * r;
    if (chains == 2) {
      PL_UNROLL
      for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], sums[4 + i]);
    }
    float found[4];
    hsum_four(sums, found);
    float* to = g.sums + (row + r) * g.sums_stride + k;
    PL_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = g.factor * g.scales[k + i] * found[i];
  }
}

// Four rows of A are read from memory once, and from the first cache for each further tile of rows.
template <bool Floats>
static void shrink_as(const ShrinkArgs& g) {
  const int64_t bytes = (g.columns + kPanel - 1) / kPanel * kPanel * 4 * (Floats ? 4 : 2);
  for (int64_t k = 0; k < g.rank; k += 4) {
    const uint8_t* a = g.a + k / 4 * bytes;
    for (int row = 0; row < g.count;) {
      const int left = g.count - row;
      // registers hold the sums of three rows
      const int some = PL_LEVEL < 2 || left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
      if (some == 3)
        shrink_tile<3, Floats>(g, row, k, a);
      else if (some == 2)
        shrink_tile<2, Floats>(g, row, k, a);
      else
        shrink_tile<1, Floats>(g, row, k, a);
      row += some;
    }
  }
}

static void shrink(const ShrinkArgs& g) { g.floats ? shrink_as<true>(g) : shrink_as<false>(g); }

}  // namespace PL_NAMESPACE
