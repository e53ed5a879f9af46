// What every product does with its sums, and how far ahead it asks for weights.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace PL_NAMESPACE {
using namespace paceline;

// how far ahead of a stream of weights lines are asked for: the hardware's own prefetchers stop at
// the end of a page. Loops over one row take so little time that a third of this way lost up to a sixth
#if PL_LEVEL >= 1
constexpr int kAhead = 4608;
#else
constexpr int kAhead = 1536;
#endif

// Sums of a tile's rows, for `finish`.
using Sums = float[kPanel];

PL_INLINE vf gated_product(const GemmArgs& g, vf gate, vf up) {
  if (g.epilogue == Epilogue::kSilu) return mul(silu(gate), up);
  if (g.epilogue == Epilogue::kGelu) return mul(gelu(gate), up);
  const vf limit = set1(g.limit), one = set1(1.0f);
  // what is not a number stays so as the second of the two
  gate = vmin(limit, gate);
  up = vmax(sub(zero(), limit), vmin(limit, up));
  // x sigmoid(1.702 x)
  const vf y = div(gate, add(one, exp2v(mul(gate, set1(-1.702f * 1.4426950408889634f)))));
  return mul(y, add(up, one));
}

// Most rows of a tile, for what adapters add to them.
constexpr int kMostTileRows = 16;

// The second of an adapter's two products, for N rows that share it. Sums are of even and of odd ranks apart where there
// are registers for that: one chain alone would wait for itself. A row's sums are the same for every N.
template <int N, bool Floats>
static void expand_rows(const RowAdapter* rows, const AdapterPanel& panel, Sums* added) {
  constexpr int chains = PL_LEVEL >= 2 ? 2 : 1;
  vf acc[chains * 2 * N];
  PL_UNROLL
  for (int i = 0; i < chains * 2 * N; ++i) acc[i] = zero();
  const uint8_t* b = panel.b;
  constexpr int64_t bytes = kPanel * (Floats ? 4 : 2);
  for (int32_t k = 0; k < panel.rank; k += chains) {
    // of the panel that follows
    for (int64_t line = 0; line < chains * bytes; line += 64) prefetch_l2(b + panel.rank * bytes + line);
    PL_UNROLL
    for (int c = 0; c < chains; ++c, b += bytes) {
      vf b0, b1;
      if constexpr (Floats) {
        b0 = load(reinterpret_cast<const float*>(b));
        b1 = load(reinterpret_cast<const float*>(b) + 16);
      } else {
        load_bf16_pair(b, b0, b1);
      }
      PL_UNROLL
      for (int r = 0; r < N; ++r) {
        vf* sums = acc + c * 2 * N + 2 * r;
        sums[0] = fma(b0, set1(rows[r].sums[panel.first[0] + k + c]), sums[0]);
        sums[1] = fma(b1, set1(rows[r].sums[panel.first[1] + k + c]), sums[1]);
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < N; ++r) {
    store(added[r], chains == 2 ? add(acc[2 * r], acc[2 * N + 2 * r]) : acc[2 * r]);
    store(added[r] + 16, chains == 2 ? add(acc[2 * r + 1], acc[2 * N + 2 * r + 1]) : acc[2 * r + 1]);
  }
}

template <int N, bool Floats>
static void expand_some(const RowAdapter* rows, int count, const AdapterPanel& panel, Sums* added) {
  if constexpr (N > 1) {
    if (count < N) return expand_some<N - 1, Floats>(rows, count, panel, added);
  }
  expand_rows<N, Floats>(rows, panel, added);
}

template <bool Floats>
static void expand_run(const RowAdapter* rows, int count, const AdapterPanel& panel, Sums* added) {
  constexpr int most = PL_LEVEL >= 2 ? 6 : PL_LEVEL == 1 ? 2 : 1;
  // equal parts rather than full ones and a thin rest
  for (int parts = (count + most - 1) / most, r = 0; parts > 0; --parts) {
    const int some = (count - r + parts - 1) / parts;
    expand_some<most, Floats>(rows + r, some, panel, added + r);
    r += some;
  }
}

// What the adapters of a tile's rows add to a panel; rows without one are left as they are.
static __attribute__((noinline)) void expand(const GemmArgs& g, int rows, int64_t row, int64_t panel, Sums* added) {
  const RowAdapter* of = g.adapters + row;
  for (int r = 0; r < rows;) {
    const AdapterPanel* panels = of[r].panels;
    int end = r + 1;
    while (end < rows && of[end].panels == panels) ++end;
    if (panels) {
      const AdapterPanel& own = panels[g.first_panel + panel];
      if (of[r].floats)
        expand_run<true>(of + r, end - r, own, added + r);
      else
        expand_run<false>(of + r, end - r, own, added + r);
    }
    r = end;
  }
}

PL_INLINE void finish(const GemmArgs& g, const vf* tile, int rows, int64_t row, int64_t panel) {
  const int64_t column = panel * kPanel;
  const int64_t left = g.w.rows - column;
  const int n0 = left >= 16 ? 16 : int(left), n1 = left >= 32 ? 16 : left > 16 ? int(left - 16) : 0;
  vf bias0 = zero(), bias1 = zero();
  if (g.bias) {
    bias0 = load_n(g.bias + column, n0);
    if (n1) bias1 = load_n(g.bias + column + 16, n1);
  }
  alignas(64) Sums added[kMostTileRows];
  if (g.adapters) expand(g, rows, row, panel, added);
  for (int r = 0; r < rows; ++r) {
    vf y0 = add(tile[2 * r], bias0), y1 = add(tile[2 * r + 1], bias1);
    if (g.adapters && g.adapters[row + r].panels) {
      y0 = add(y0, load(added[r]));
      y1 = add(y1, load(added[r] + 16));
    }
    if (g.epilogue >= Epilogue::kSilu) {
      const vf y = gated_product(g, y0, y1);
      const int64_t at = (row + r) * g.out_stride + panel * 16;
      if (g.out_bf16)
        store_bf16(static_cast<uint16_t*>(g.out) + at, y);
      else
        store(static_cast<float*>(g.out) + at, y);
      continue;
    }
    float* out = static_cast<float*>(g.out) + (row + r) * g.out_stride + column;
    if (n1 == 16) {
      if (g.epilogue == Epilogue::kAdd) {
        store(out, add(load(out), y0));
        store(out + 16, add(load(out + 16), y1));
      } else {
        store(out, y0);
        store(out + 16, y1);
      }
    } else {
      const bool sum = g.epilogue == Epilogue::kAdd;
      store_n(out, sum ? add(load_n(out, n0), y0) : y0, n0);
      if (n1) store_n(out + 16, sum ? add(load_n(out + 16, n1), y1) : y1, n1);
    }
  }
}

// Ask for the lines that ``finish`` will write: by the time the products are done they are here.
PL_INLINE void expect(const GemmArgs& g, int rows, int64_t row, int64_t panel) {
  const bool gated = g.epilogue >= Epilogue::kSilu;
  const int64_t column = panel * (gated ? 16 : kPanel), bytes = gated && g.out_bf16 ? 2 : 4;
  for (int r = 0; r < rows; ++r) {
    const uint8_t* out = static_cast<const uint8_t*>(g.out) + ((row + r) * g.out_stride + column) * bytes;
    prefetch_for_write(out);
    if (!gated) prefetch_for_write(out + 64);
  }
}

}  // namespace PL_NAMESPACE
