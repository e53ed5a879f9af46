// Products of packed weights: register-tiled micro-kernels, one panel of 32 outputs at a time. For AVX-512 and
// plain C++; gemm_avx2.h has those for 256 bits.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

// accumulators of a tile are 2 * rows registers; two hold weights and one a broadcast
#if PL_LEVEL >= 2
constexpr int kTileRows = 13;
// the sums over groups need registers too
constexpr int kTileRowsI8 = PL_BYTE_DOTS ? 6 : 4;
constexpr int kTileRowsQ4 = PL_BYTE_DOTS ? 6 : 4;
constexpr int kBlockTileRows = PL_BYTE_DOTS ? 6 : 4;
#else
constexpr int kTileRows = 4;
constexpr int kTileRowsI8 = 2;
constexpr int kTileRowsQ4 = 1;
constexpr int kBlockTileRows = 1;
#endif

// `ahead` and `ahead_step`: the part of the next panel to ask for on the way, in bytes a unit. A line may
// be asked for several times.
template <class D, int R>
static void tile(const GemmArgs& g, int64_t row, int64_t panel, const uint8_t* ahead, int64_t ahead_step) {
  expect(g, R, row, panel);
  const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
  const int64_t s = g.a_stride;
  (void)ahead, (void)ahead_step;  // few rows: the weights are fetched ahead line by line
  // rows are addressed from three moving bases, so that x86 addressing (base + {1,2,4} * s) covers
  // them without a pointer a row
  const uint8_t* base[3] = {g.a + row * s, g.a + (row + 5) * s, g.a + (row + 10) * s};
  typename D::Acc acc[2 * R];
  PL_UNROLL
  for (int i = 0; i < 2 * R; ++i) acc[i] = D::none();
  if constexpr (R <= 2 && PL_LEVEL >= 2) {
    // few rows: lines are asked for four at a time. Sums are one chain each, as with more rows: two would be
    // another order of sums, and a row's result must not depend on those beside it
    int64_t u = 0;
    for (; u + 2 <= g.w.units; u += 2) {
      for (int line = 0; line < 256; line += 64) prefetch(w + kAhead + line);
      const auto w0 = D::weight(w), w1 = D::weight(w + 64);
      const auto w2 = D::weight(w + 128), w3 = D::weight(w + 192);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto x = D::value(base[0] + r * s + 4 * u), y = D::value(base[0] + r * s + 4 * u + 4);
        acc[2 * r] = D::dot(acc[2 * r], x, w0);
        acc[2 * r + 1] = D::dot(acc[2 * r + 1], x, w1);
        acc[2 * r] = D::dot(acc[2 * r], y, w2);
        acc[2 * r + 1] = D::dot(acc[2 * r + 1], y, w3);
      }
      w += 256;
    }
    if (u < g.w.units) {
      const auto w0 = D::weight(w), w1 = D::weight(w + 64);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto x = D::value(base[0] + r * s + 4 * u);
        acc[2 * r] = D::dot(acc[2 * r], x, w0);
        acc[2 * r + 1] = D::dot(acc[2 * r + 1], x, w1);
      }
    }
  } else {
    for (int64_t u = 0; u < g.w.units; ++u) {
      const auto w0 = D::weight(w), w1 = D::weight(w + 64);
      prefetch_l2(ahead);
      prefetch_l2(ahead + 64);
      ahead += ahead_step;
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto x = D::value(base[r / 5] + (r % 5) * s);
        acc[2 * r] = D::dot(acc[2 * r], x, w0);
        acc[2 * r + 1] = D::dot(acc[2 * r + 1], x, w1);
      }
      w += 128;
      base[0] += 4;
      base[1] += 4;
      base[2] += 4;
    }
  }
  finish(g, acc, R, row, panel);
}

// int8 weights with a scale an output; activations in groups of 64 with a scale each. `ahead_lines` of
// the next panel are asked for with every group: with a few rows a tile, asking for a line twice costs
// as much as it gains.
template <int R>
static void tile_i8(const GemmArgs& g, int64_t row, int64_t panel, const uint8_t* ahead, int64_t ahead_lines) {
  constexpr int64_t group_units = kActGroup / 4;
  expect(g, R, row, panel);
  const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
  const int64_t s = g.a_stride, groups = (g.w.columns + kActGroup - 1) / kActGroup;
  const float* scales = g.a_scale + row * (groups + 1);
  const uint8_t* base[3] = {g.a + row * s, g.a + (row + 5) * s, g.a + (row + 10) * s};
  vf out[2 * R];
  PL_UNROLL
  for (int i = 0; i < 2 * R; ++i) out[i] = zero();
  int64_t left = g.w.units;
  for (int64_t k = 0; k < groups; ++k, left -= group_units) {
    vi acc[2 * R];
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) acc[i] = zeroi();
    if constexpr (R > 2) {
      for (int64_t i = 0; i < ahead_lines; ++i, ahead += 64) prefetch_l2(ahead);
    }
    int64_t u = left < group_units ? left : group_units;
#if !PL_BYTE_DOTS
    for (; u > 1; u -= 2) {
      const vi w0 = loadi(w), w1 = loadi(w + 64), v0 = loadi(w + 128), v1 = loadi(w + 192);
      if constexpr (R <= 2)
        for (int line = 0; line < 256; line += 64) prefetch(w + kAhead + line);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const uint8_t* a = base[r / 5] + (r % 5) * s;
        const vi x = set1i(int32_t(load_u32(a))), y = set1i(int32_t(load_u32(a + 4)));
        acc[2 * r] = dot_fours(acc[2 * r], w0, x, v0, y);
        acc[2 * r + 1] = dot_fours(acc[2 * r + 1], w1, x, v1, y);
      }
      w += 256;
      base[0] += 8;
      base[1] += 8;
      base[2] += 8;
    }
    // columns of a last unit without a second: the two products of a lane fit where those of four would
#endif
    for (; u > 0; --u) {
      const vi w0 = loadi(w), w1 = loadi(w + 64);
      if constexpr (R <= 2) {
        prefetch(w + kAhead);
        prefetch(w + kAhead + 64);
      }
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const vi x = set1i(int32_t(load_u32(base[r / 5] + (r % 5) * s)));
        acc[2 * r] = dot_bytes(acc[2 * r], w0, x);
        acc[2 * r + 1] = dot_bytes(acc[2 * r + 1], w1, x);
      }
      w += 128;
      base[0] += 4;
      base[1] += 4;
      base[2] += 4;
    }
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf x = set1(scales[r * (groups + 1) + k]);
      out[2 * r] = fma(to_float(acc[2 * r]), x, out[2 * r]);
      out[2 * r + 1] = fma(to_float(acc[2 * r + 1]), x, out[2 * r + 1]);
    }
  }
  const vf s0 = load(g.w.scale + panel * kPanel), s1 = load(g.w.scale + panel * kPanel + 16);
  PL_UNROLL
  for (int r = 0; r < R; ++r) {
    const vf offset = set1(scales[r * (groups + 1) + groups]);
    out[2 * r] = mul(sub(out[2 * r], offset), s0);
    out[2 * r + 1] = mul(sub(out[2 * r + 1], offset), s1);
  }
  finish(g, out, R, row, panel);
}

// Two units in the halves of one: acc += the lower halves times four columns of R rows of activations, and the
// upper ones times the four that are 16 columns further on.
template <int R>
PL_INLINE void add_halves(vi (&acc)[2 * R], const uint8_t* w, const uint8_t* a, int64_t stride) {
  const vi both0 = loadi(w), both1 = loadi(w + 64);
  const vi l0 = low_nibbles(both0), h0 = high_nibbles(both0);
  const vi l1 = low_nibbles(both1), h1 = high_nibbles(both1);
  PL_UNROLL
  for (int r = 0; r < R; ++r) {
    const vi x = set1i(int32_t(load_u32(a + r * stride))), y = set1i(int32_t(load_u32(a + r * stride + 16)));
    acc[2 * r] = dot_nibbles(acc[2 * r], l0, x);
    acc[2 * r + 1] = dot_nibbles(acc[2 * r + 1], l1, x);
    acc[2 * r] = dot_nibbles(acc[2 * r], h0, y);
    acc[2 * r + 1] = dot_nibbles(acc[2 * r + 1], h1, y);
  }
}

// The scales and minimums of a group for 16 outputs, in steps of each.
template <Weights Kind>
struct Scales16 {
#if PL_BYTE_DOTS
  vi pairs;
  PL_INLINE_MEMBER Scales16(const uint8_t* of_group, int other)
      : pairs(Kind == Weights::kQ40 ? load_u16(of_group + other * 32) : loadi(of_group + other * 64)) {}
  // out plus the group's products: `sums` of nibbles times activations, whose scale is x and whose sum `total`
  PL_INLINE_MEMBER vf add(vi sums, vf x, vf, vf out) const {
    return fma(to_float(multiply_pairs(xori(sums, set1i(32768)), pairs)), x, out);
  }
#else
  vi both;
  vf minimum = zero();
  PL_INLINE_MEMBER Scales16(const uint8_t* of_group, int other) {
    const vi own = Kind == Weights::kQ40 ? load_u16(of_group + other * 32) : loadi(of_group + other * 64);
    if constexpr (Kind == Weights::kQ4) minimum = to_float(upper_16(own));
    both = twice_lower_16(own);
  }
  PL_INLINE_MEMBER vf add(vi sums, vf x, vf total, vf out) const {
    out = fma(to_float(multiply_pairs(sums, both)), x, out);
    return Kind == Weights::kQ4 ? fma(minimum, total, out) : out;
  }
#endif
};

// 4-bit weights, groups of 32 inputs; activations s8 with group scales.
template <Weights Kind, int R>
static void tile_q4(const GemmArgs& g, int64_t row, int64_t panel) {
  expect(g, R, row, panel);
  const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
  const int64_t groups = g.w.columns / kGroup, next = kActScales * groups;
  const float* own = g.a_scale + row * next;
  constexpr int bytes = Kind == Weights::kQ40 ? kQ40GroupBytes : kQ4GroupBytes;
  vf out[2 * R];
  PL_UNROLL
  for (int i = 0; i < 2 * R; ++i) out[i] = zero();
  for (int64_t k = 0; k < groups; ++k, ++own) {
    for (int line = 0; line < bytes; line += 64) prefetch(w + kAhead + line);
    vi acc[2 * R];
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) acc[i] = set1i(int32_t(load_u32(own + i / 2 * next + 4 * groups)));
    for (int j = 0; j < 4; ++j)
      add_halves<R>(acc, w + j * 128, g.a + row * g.a_stride + k * kGroup + j * 4, g.a_stride);
    const Scales16<Kind> first(w + kNibbleBytes, 0), second(w + kNibbleBytes, 1);
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf x = set1(own[r * next]), total = set1(own[r * next + groups]);
      out[2 * r] = first.add(acc[2 * r], x, total, out[2 * r]);
      out[2 * r + 1] = second.add(acc[2 * r + 1], x, total, out[2 * r + 1]);
    }
    w += bytes;
  }
  const vf s0 = load(g.w.scale + panel * kPanel), s1 = load(g.w.scale + panel * kPanel + 16);
  PL_UNROLL
  for (int i = 0; i < 2 * R; ++i) out[i] = mul(out[i], i % 2 ? s1 : s0);
  finish(g, out, R, row, panel);
}

// Units of bytes below 64 times activations; so four products of a lane fit 16 bits whatever they are.
template <int R, int Units>
PL_INLINE void add_units(vi (&acc)[2 * R], const uint8_t* w, const uint8_t* a, int64_t stride) {
#if PL_BYTE_DOTS
  PL_UNROLL
  for (int u = 0; u < Units; ++u) {
    const vi w0 = loadi(w + u * 128), w1 = loadi(w + u * 128 + 64);
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vi x = set1i(int32_t(load_u32(a + r * stride + u * 4)));
      acc[2 * r] = dot_bytes(acc[2 * r], w0, x);
      acc[2 * r + 1] = dot_bytes(acc[2 * r + 1], w1, x);
    }
  }
#else
  PL_UNROLL
  for (int u = 0; u < Units; u += 2) {
    const vi w0 = loadi(w + u * 128), w1 = loadi(w + u * 128 + 64);
    const vi v0 = loadi(w + u * 128 + 128), v1 = loadi(w + u * 128 + 192);
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const uint8_t* from = a + r * stride + u * 4;
      const vi x = set1i(int32_t(load_u32(from))), y = set1i(int32_t(load_u32(from + 4)));
      acc[2 * r] = dot_fours(acc[2 * r], w0, x, v0, y);
      acc[2 * r + 1] = dot_fours(acc[2 * r + 1], w1, x, v1, y);
    }
  }
#endif
}

// Rows times what blocks of a K kind were unpacked to, see blocks.h.
template <class K, int R, class In>
static __attribute__((noinline)) void multiply_blocks(const GemmArgs& g, int64_t row, int64_t block, int64_t count,
                                                      const In& in, Sums* sums) {
  (void)count;  // of kinds that are unpacked to bytes there is one
  const int64_t groups = g.w.columns / kGroup, s = g.a_stride, next = kActScales * groups;
  const uint8_t *a = g.a + row * s + block * kBlock, *w = K::nibbles ? in.nibbles : in.bytes;
  const float* own = g.a_scale + row * next + block * kGroupsOfBlock;
  if constexpr (K::parts == 2) {
    const float* offsets = g.a_scale + row * next + 2 * groups + block * (kBlock / 16);
    for (int k = 0; k < kGroupsOfBlock; ++k, ++own, offsets += 2, w += kGroup * kPanel, a += kGroup) {
      // of both scales of the group; sums are added to in memory, since there are no more registers
      vf both[2 * R];
      PL_UNROLL
      for (int part = 0; part < 2; ++part) {
        vi acc[2 * R];
        PL_UNROLL
        for (int i = 0; i < 2 * R; ++i) acc[i] = set1i(int32_t(load_u32(offsets + i / 2 * next + part)));
        add_units<R, 4>(acc, w + part * 16 * kPanel, a + part * 16, s);
        const float* steps = in.steps[2 * k + part];
        PL_UNROLL
        for (int i = 0; i < 2 * R; ++i) {
          const vf step = load(steps + i % 2 * 16), product = to_float(acc[i]);
          both[i] = part ? fma(product, step, both[i]) : mul(product, step);
        }
      }
      PL_UNROLL
      for (int i = 0; i < 2 * R; ++i) {
        float* out = sums[i / 2] + i % 2 * 16;
        store(out, fma(both[i], set1(own[i / 2 * next]), load(out)));
      }
    }
  } else {
    vf out[2 * R];
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) out[i] = load(sums[i / 2] + i % 2 * 16);
    for (int64_t k = 0; k < count * kGroupsOfBlock; ++k, ++own, a += kGroup) {
      vi acc[2 * R];
      PL_UNROLL
      for (int i = 0; i < 2 * R; ++i) acc[i] = zeroi();
      if constexpr (K::nibbles) {
        for (int j = 0; j < 4; ++j) add_halves<R>(acc, w + j * 128, a + j * 4, s);
        w += k % kGroupsOfBlock == kGroupsOfBlock - 1 ? kNibbleBytes + kQ4KNibbles : kNibbleBytes;
        PL_UNROLL
        for (int i = 0; i < 2 * R; ++i) acc[i] = widen(acc[i]);
      } else {
        add_units<R, 8>(acc, w, a, s);
        w += kGroup * kPanel;
      }
      const vf s0 = load(in.steps[k]), s1 = load(in.steps[k] + 16);
      const vf m0 = load(in.lows[k]), m1 = load(in.lows[k] + 16);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const vf x = set1(own[r * next]), sum = set1(own[r * next + groups]);
        out[2 * r] = fma(m0, sum, fma(to_float(acc[2 * r]), mul(s0, x), out[2 * r]));
        out[2 * r + 1] = fma(m1, sum, fma(to_float(acc[2 * r + 1]), mul(s1, x), out[2 * r + 1]));
      }
    }
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) store(sums[i / 2] + i % 2 * 16, out[i]);
  }
}

struct DotI8 {
  static constexpr int per_unit = 4;
};

template <class D, int R>
static void run_tile(const GemmArgs& g, int64_t row, int64_t panel, int rows, const uint8_t* ahead,
                     int64_t ahead_step) {
  if constexpr (R > 1) {
    if (rows < R) return run_tile<D, R - 1>(g, row, panel, rows, ahead, ahead_step);
  }
  if constexpr (D::per_unit == 4)
    tile_i8<R>(g, row, panel, ahead, ahead_step);
  else
    tile<D, R>(g, row, panel, ahead, ahead_step);
}

template <Weights Kind, int R>
static void run_tile_q4(const GemmArgs& g, int64_t row, int64_t panel, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return run_tile_q4<Kind, R - 1>(g, row, panel, rows);
  }
  tile_q4<Kind, R>(g, row, panel);
}

template <class D>
static void gemm(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  constexpr int most = D::per_unit == 4 ? kTileRowsI8 : kTileRows;
  if (begin == end) return;
  // equal tiles rather than full ones and a thin rest
  const int64_t count = (end - begin + most - 1) / most;
  const uint8_t* next = g.w.data + (panel + 1) * g.w.panel_bytes;
  int64_t step = kPanel * 4 / count;
  if (D::per_unit == 4) {
    const int64_t parts = count * ((g.w.columns + kActGroup - 1) / kActGroup);
    step = (g.w.panel_bytes / 64 + parts - 1) / parts;
  }
  for (int64_t tiles = count; tiles > 0; --tiles) {
    const int rows = int((end - begin + tiles - 1) / tiles);
    run_tile<D, most>(g, begin, panel, rows, next + (count - tiles) * (g.w.panel_bytes / 64) / count * 64, step);
    begin += rows;
  }
}

template <Weights Kind>
static void gemm_q4(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  for (int64_t tiles = (end - begin + kTileRowsQ4 - 1) / kTileRowsQ4; tiles > 0; --tiles) {
    const int rows = int((end - begin + tiles - 1) / tiles);
    run_tile_q4<Kind, kTileRowsQ4>(g, begin, panel, rows);
    begin += rows;
  }
}

}  // namespace PL_NAMESPACE
