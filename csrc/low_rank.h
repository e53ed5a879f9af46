// Both products of an adapter: rows times the rows of A, and what B makes of those sums for a panel of outputs.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

// Half of the values of 32 columns, see adapter.h.
template <AdapterValues Kind, int Half>
PL_INLINE vf adapter_half(const uint8_t* p) {
  if constexpr (Kind == AdapterValues::kF32) return load(reinterpret_cast<const float*>(p) + 16 * Half);
  if constexpr (Kind == AdapterValues::kS8) return load_s8(p + 16 * Half);
  return Half ? load_bf16_high(p) : load_bf16_low(p);
}

// Adds what 16 columns give: N rows from `d` on, of which `left` columns are there, times four rows of A.
template <int N, AdapterValues Kind, int Half, bool Whole>
PL_INLINE void shrink_half(const float* const* x, int64_t d, int64_t left, const uint8_t* a, vf* sums) {
  constexpr int64_t bytes = kPanel * adapter_value_bytes(Kind);
  const int count = Whole || left >= 16 ? 16 : left > 0 ? int(left) : 0;
  // of one row, in an order that few registers are enough for
  vf of_a[4];
  PL_UNROLL
  for (int i = 0; i < 4 && N > 1; ++i) of_a[i] = adapter_half<Kind, Half>(a + i * bytes);
  PL_UNROLL
  for (int r = 0; r < N; ++r) {
    const vf values = Whole ? load(x[r] + d) : load_n(x[r] + d, count);
    PL_UNROLL
    for (int i = 0; i < 4; ++i)
      sums[4 * r + i] = fma(values, N > 1 ? of_a[i] : adapter_half<Kind, Half>(a + i * bytes), sums[4 * r + i]);
  }
}

// N rows times four rows of A: a chain of sums for each pair, whatever N is, so that a row's result is the same in any
// company. A few chains of one row are done before its part of A has come from memory.
template <int N, AdapterValues Kind>
static void shrink_tile(const ShrinkArgs& g, int row, int64_t k, const uint8_t* a, int tile, int tiles) {
  constexpr int64_t bytes = kPanel * adapter_value_bytes(Kind);
  const float* x[N];
  vf sums[N * 4];
  PL_UNROLL
  for (int r = 0; r < N; ++r) x[r] = g.x[row + r];
  PL_UNROLL
  for (int i = 0; i < N * 4; ++i) sums[i] = zero();
  int64_t d = 0;
  for (int turn = tile; d + kPanel <= g.columns; d += kPanel, a += 4 * bytes) {
    // each tile asks for its part, so that memory has work all the time
    if (turn == 0)
      for (int64_t line = 0; line < 4 * bytes; line += 64) prefetch(a + kAhead + line);
    turn = turn == 0 ? tiles - 1 : turn - 1;
    shrink_half<N, Kind, 0, true>(x, d, 16, a, sums);
    shrink_half<N, Kind, 1, true>(x, d + 16, 16, a, sums);
  }
  if (d < g.columns) {
    shrink_half<N, Kind, 0, false>(x, d, g.columns - d, a, sums);
    shrink_half<N, Kind, 1, false>(x, d + 16, g.columns - d - 16, a, sums);
  }
  PL_UNROLL
  for (int r = 0; r < N; ++r) {
    float found[4];
    hsum_four(sums + 4 * r, found);
    PL_UNROLL
    for (int i = 0; i < 4; ++i)
      g.shrunk.sums[(k + i) * g.shrunk.stride + row + r] = g.factor * g.scales[k + i] * found[i];
  }
}

template <int N, AdapterValues Kind>
static void shrink_some(const ShrinkArgs& g, int row, int count, int64_t k, const uint8_t* a, int tile, int tiles) {
  if constexpr (N > 1) {
    if (count < N) return shrink_some<N - 1, Kind>(g, row, count, k, a, tile, tiles);
  }
  shrink_tile<N, Kind>(g, row, k, a, tile, tiles);
}

// Four rows of A are read from memory once, and from the first cache for each further tile of rows.
template <AdapterValues Kind>
static void shrink_as(const ShrinkArgs& g) {
  // as many as registers hold the sums of
  constexpr int most = PL_LEVEL >= 2 ? 6 : 1;
  const int64_t bytes = (g.columns + kPanel - 1) / kPanel * kPanel * 4 * adapter_value_bytes(Kind);
  for (int64_t k = 0; k < g.rank; k += 4) {
    const uint8_t* a = g.a + k / 4 * bytes;
    // equal tiles rather than full ones and a thin rest
    const int tiles = (g.count + most - 1) / most;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
      const int some = (g.count - row + tiles - tile - 1) / (tiles - tile);
      shrink_some<most, Kind>(g, row, some, k, a, tile, tiles);
      row += some;
    }
  }
}

static void shrink(const ShrinkArgs& g) {
  if (g.values == AdapterValues::kF32) return shrink_as<AdapterValues::kF32>(g);
  if (g.values == AdapterValues::kS8) return shrink_as<AdapterValues::kS8>(g);
  shrink_as<AdapterValues::kBF16>(g);
}

// The second of an adapter's two products, for N rows that share it, from the `row`-th of `shrunk` on. A row's sums are
// the same for every N. Of one row alone each chain waits for itself, but B comes from memory no faster.
template <int N, AdapterValues Kind>
static void expand_rows(const Shrunk& shrunk, int64_t row, const AdapterPanel& panel, bool ahead, Sums* added) {
  vf sums[2 * N];
  PL_UNROLL
  for (int i = 0; i < 2 * N; ++i) sums[i] = zero();
  const uint8_t* b = panel.b;
  const float* x0 = shrunk.sums + panel.first[0] * shrunk.stride + row;
  const float* x1 = shrunk.sums + panel.first[1] * shrunk.stride + row;
  constexpr int64_t bytes = kPanel * adapter_value_bytes(Kind);
  for (int32_t k = 0; k < panel.rank; ++k, b += bytes, x0 += shrunk.stride, x1 += shrunk.stride) {
    // of the panel that follows
    for (int64_t line = 0; line < bytes && ahead; line += 64) prefetch_l2(b + panel.rank * bytes + line);
    const vf b0 = adapter_half<Kind, 0>(b), b1 = adapter_half<Kind, 1>(b);
    PL_UNROLL
    for (int r = 0; r < N; ++r) {
      sums[2 * r] = fma(b0, set1(x0[r]), sums[2 * r]);
      sums[2 * r + 1] = fma(b1, set1(x1[r]), sums[2 * r + 1]);
    }
  }
  PL_UNROLL
  for (int r = 0; r < N; ++r) {
    store(added[r], sums[2 * r]);
    store(added[r] + 16, sums[2 * r + 1]);
  }
}

template <int N, AdapterValues Kind>
static void expand_some(const Shrunk& shrunk, int64_t row, int count, const AdapterPanel& panel, bool ahead,
                        Sums* added) {
  if constexpr (N > 1) {
    if (count < N) return expand_some<N - 1, Kind>(shrunk, row, count, panel, ahead, added);
  }
  expand_rows<N, Kind>(shrunk, row, panel, ahead, added);
}

template <AdapterValues Kind>
static void expand_run(const Shrunk& shrunk, int64_t row, int count, const AdapterPanel& panel, Sums* added) {
  // as many as registers hold the sums of
  constexpr int most = PL_LEVEL >= 2 ? 12 : PL_LEVEL == 1 ? 2 : 1;
  // equal parts rather than full ones and a thin rest
  for (int parts = (count + most - 1) / most, r = 0; parts > 0; --parts) {
    const int some = (count - r + parts - 1) / parts;
    expand_some<most, Kind>(shrunk, row + r, some, panel, r == 0, added + r);
    r += some;
  }
}

// Whole runs of rows rather than those of a tile, and before the products, whose sums would not stay in registers.
static void expand(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  for (int64_t r = begin, next; r < end; r = next) {
    const RowAdapter& use = g.adapters[r];
    for (next = r + 1; next < end && g.adapters[next].panels == use.panels;) ++next;
    if (!use.panels) continue;
    const AdapterPanel& own = use.panels[g.first_panel + panel];
    const auto run = use.values == AdapterValues::kF32   ? expand_run<AdapterValues::kF32>
                     : use.values == AdapterValues::kS8 ? expand_run<AdapterValues::kS8>
                                                        : expand_run<AdapterValues::kBF16>;
    run(g.shrunk, r, int(next - r), own, g.added + r);
  }
}

}  // namespace PL_NAMESPACE
