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

PL_INLINE void finish(const GemmArgs& g, const vf* tile, int rows, int64_t row, int64_t panel) {
  const int64_t column = panel * kPanel;
  const int64_t left = g.w.rows - column;
  const int n0 = left >= 16 ? 16 : int(left), n1 = left >= 32 ? 16 : left > 16 ? int(left - 16) : 0;
  vf bias0 = zero(), bias1 = zero();
  if (g.bias) {
    bias0 = load_n(g.bias + column, n0);
    if (n1) bias1 = load_n(g.bias + column + 16, n1);
  }
  for (int r = 0; r < rows; ++r) {
    vf y0 = add(tile[2 * r], bias0), y1 = add(tile[2 * r + 1], bias1);
    if (g.adapters && g.adapters[row + r].panels) {
      y0 = add(y0, load(g.added[row + r]));
      y1 = add(y1, load(g.added[row + r] + 16));
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
