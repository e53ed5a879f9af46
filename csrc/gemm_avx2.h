// Products of packed weights in registers of 256 bits.
//
// There are 16 registers, so a tile is at most 12 of sums, and gcc keeps them there only if they are plain
// arrays of __m256: in arrays of pairs of them (vf, vi) every sum is stored after every product. Where a
// product takes several instructions they are one piece of assembly with temporaries of its own, since gcc
// starts several products early and then has no registers left. A tile of three rows or more has 16 of a
// panel's 32 outputs, and goes through the panel twice; one of fewer rows has all 32, since its sums would
// otherwise be too few to hide how long a product takes.
//
// A row's result does not depend on the rows beside it: every tile adds in the same order.
#pragma once
#include "dot_avx2.h"
#include "epilogue.h"

namespace PL_NAMESPACE {

// The part of the next panel that a tile asks for on its way: so many lines for every group of units.
struct NextPanel {
  const uint8_t* at;
  int64_t lines;
  PL_INLINE_MEMBER void step() {
    for (int64_t i = 0; i < lines; ++i, at += 64) prefetch_l2(at);
  }
};

// What was read before is read again.
PL_INLINE void forget_memory() { __asm__ volatile("" : : : "memory"); }

// What is in `sums` is in memory from here on, not in registers that the loop of products needs.
PL_INLINE void leave_registers(void* sums) { __asm__ volatile("" : : "r"(sums) : "memory"); }

template <int R, int H>
PL_INLINE void clear(__m256i (&sum)[R][H]) {
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < H; ++i) sum[r][i] = _mm256_setzero_si256();
}

#if PL_BYTE_DOTS
// Adds products of 32 columns: the lower halves of the weights times four activations, the upper ones times those
// 16 columns further on, and so four times.
template <int R, int H>
PL_INLINE void multiply_nibbles(const uint8_t* w, const uint8_t* a, int64_t s, __m256i (&sum)[R][H]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; ++j, w += 128, a += 4) {
    PL_UNROLL
    for (int i = 0; i < H; i += 2) {
      const __m256i low0 = _mm256_and_si256(load_8(w + 32 * i), mask);
      const __m256i low1 = _mm256_and_si256(load_8(w + 32 * i + 32), mask);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_4(a + r * s);
        add_dots(sum[r][i], low0, x);
        add_dots(sum[r][i + 1], low1, x);
      }
      // twelve sums leave no registers to keep the weights in until here
      if constexpr (R * H > 8) forget_memory();
      const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(load_8(w + 32 * i), 4), mask);
      const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(load_8(w + 32 * i + 32), 4), mask);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_4(a + r * s + 16);
        add_dots(sum[r][i], high0, x);
        add_dots(sum[r][i + 1], high1, x);
      }
    }
  }
}
#else
// The same in 16 bits, two columns a lane.
template <int R, int H>
PL_INLINE void multiply_nibbles(const uint8_t* w, const uint8_t* a, int64_t s, __m256i (&sum)[R][H]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; ++j, w += 128, a += 4) {
    // two registers of weights at a time
    PL_UNROLL
    for (int i = 0; i < H; i += 2) {
      const __m256i both0 = load_8(w + 32 * i), both1 = load_8(w + 32 * i + 32);
      const __m256i low0 = _mm256_and_si256(both0, mask), low1 = _mm256_and_si256(both1, mask);
      const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(both0, 4), mask);
      const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(both1, 4), mask);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_4(a + r * s);
        add_pairs(sum[r][i], low0, x);
        add_pairs(sum[r][i + 1], low1, x);
        const __m256i y = broadcast_4(a + r * s + 16);
        add_pairs(sum[r][i], high0, y);
        add_pairs(sum[r][i + 1], high1, y);
      }
    }
  }
}
#endif

// The scales and minimums of a group for 8 outputs, in steps of each.
template <Weights Kind>
struct Scales8 {
#if PL_BYTE_DOTS
  __m256i pairs;
#else
  __m256i both;
  __m256 minimum = _mm256_setzero_ps();
#endif
  // of the outputs from `first` on, of a group's scales of 16 bits
  PL_INLINE_MEMBER Scales8(const uint8_t* of_group, int first) {
    __m256i own;
    if constexpr (Kind == Weights::kQ40)
      own = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(of_group + first * 2)));
    else
      own = load_8(of_group + first * 4);
#if PL_BYTE_DOTS
    pairs = own;
#else
    if constexpr (Kind == Weights::kQ4) minimum = _mm256_cvtepi32_ps(_mm256_srai_epi32(own, 16));
    const __m128i lower = _mm_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0);
    both = _mm256_shuffle_epi8(own, _mm256_broadcastsi128_si256(lower));
#endif
  }
  // out plus the group's products: `sums` of nibbles times activations, whose scale is *x and whose sum *total
  PL_INLINE_MEMBER __m256 add(__m256i sums, const float* x, const float* total, __m256 out) const {
#if PL_BYTE_DOTS
    (void)total;
    const __m256i product = _mm256_madd_epi16(_mm256_xor_si256(sums, _mm256_set1_epi32(32768)), pairs);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), _mm256_set1_ps(*x), out);
#else
    out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sums, both)), _mm256_set1_ps(*x), out);
    return Kind == Weights::kQ4 ? _mm256_fmadd_ps(minimum, _mm256_set1_ps(*total), out) : out;
#endif
  }
};

// 4-bit weights. A nibble is at most 15 and an activation at most 127 in size, so 16 products of a group's 32
// columns fit 16 bits whatever they are.
template <Weights Kind>
struct TileQ4 {
  static constexpr int rows = PL_BYTE_DOTS ? 6 : 4;
  static constexpr int bytes = Kind == Weights::kQ40 ? kQ40GroupBytes : kQ4GroupBytes;
  PL_INLINE int64_t groups(const Panels& w) { return w.columns / kGroup; }

  // R rows of H times 8 outputs from `first` on
  template <int R, int H>
  PL_INLINE void run(const GemmArgs& g, int64_t row, const uint8_t* w, int first, NextPanel next, Sums* sums) {
    const int64_t groups = g.w.columns / kGroup, s = g.a_stride;
    const uint8_t* a = g.a + row * s;
    const float* scales = g.a_scale + row * kActScales * groups;
    for (int64_t k = 0; k < groups; ++k, w += bytes, a += kGroup) {
      leave_registers(sums);
      if constexpr (H == 4)
        for (int line = 0; line < bytes; line += 64) prefetch(w + kAhead + line);
      else
        next.step();
      __m256i sum[R][H];
      PL_UNROLL
      for (int r = 0; r < R; ++r)
        PL_UNROLL
        for (int i = 0; i < H; ++i) sum[r][i] = broadcast_4(scales + (r * kActScales + 4) * groups + k);
      multiply_nibbles<R, H>(w + first * 4, a, s, sum);
      PL_UNROLL
      for (int i = 0; i < H; ++i) {
        const Scales8<Kind> scaled(w + kNibbleBytes, first + 8 * i);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          float* out = sums[r] + first + 8 * i;
          const float* own = scales + r * kActScales * groups + k;
          _mm256_store_ps(out, scaled.add(sum[r][i], own, own + groups, _mm256_load_ps(out)));
        }
      }
    }
  }

  template <int R>
  PL_INLINE void scale(const GemmArgs& g, int64_t, int64_t panel, vf (&out)[2 * R]) {
    const vf s0 = load(g.w.scale + panel * kPanel), s1 = load(g.w.scale + panel * kPanel + 16);
    for (int i = 0; i < 2 * R; ++i) out[i] = mul(out[i], i % 2 ? s1 : s0);
  }
};

// int8 weights. Without byte dots a lane of 16 bits takes the products of four activations before it is widened:
// the encoder sees to it that no sum of them is beyond what it holds, see `reach` in encode.h.
struct TileI8 {
  static constexpr int rows = PL_BYTE_DOTS ? 6 : 4;
  PL_INLINE int64_t groups(const Panels& w) { return (w.columns + kActGroup - 1) / kActGroup; }

  template <int R, int H>
  PL_INLINE void run(const GemmArgs& g, int64_t row, const uint8_t* w, int first, NextPanel next, Sums* sums) {
    constexpr int64_t group_units = kActGroup / 4;
    const int64_t count = groups(g.w), s = g.a_stride;
    const uint8_t* a = g.a + row * s;
    const float* scales = g.a_scale + row * (count + 1);
    int64_t left = g.w.units;
    w += first * 4;
    for (int64_t k = 0; k < count; ++k, left -= group_units) {
      leave_registers(sums);
      if constexpr (H == 2) next.step();
      __m256i sum[R][H];
      const int64_t units = left < group_units ? left : group_units;
      clear(sum);
      multiply<R, H>(w, a, s, units, sum);
      w += units * 128;
      a += units * 4;
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_set1_ps(scales[r * (count + 1) + k]);
        PL_UNROLL
        for (int i = 0; i < H; ++i) {
          float* out = sums[r] + first + 8 * i;
          _mm256_store_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][i]), x, _mm256_load_ps(out)));
        }
      }
    }
  }

  // Ahead: with few rows, ask for weights that come later
#if PL_BYTE_DOTS
  template <int R, int H, bool Ahead = true>
  PL_INLINE void multiply(const uint8_t* w, const uint8_t* a, int64_t s, int64_t units, __m256i (&sum)[R][H]) {
    for (; units > 0; --units, w += 128, a += 4) {
      if constexpr (H == 4 && Ahead) prefetch(w + kAhead), prefetch(w + kAhead + 64);
      PL_UNROLL
      for (int i = 0; i < H; i += 2) {
        const __m256i w0 = load_8(w + 32 * i), w1 = load_8(w + 32 * i + 32);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i x = broadcast_4(a + r * s);
          add_dots(sum[r][i], w0, x);
          add_dots(sum[r][i + 1], w1, x);
        }
      }
    }
  }
#else
  template <int R, int H, bool Ahead = true>
  PL_INLINE void multiply(const uint8_t* w, const uint8_t* a, int64_t s, int64_t units, __m256i (&sum)[R][H]) {
    for (; units > 1; units -= 2, w += 256, a += 8) {
      if constexpr (H == 4 && Ahead)
        for (int line = 0; line < 256; line += 64) prefetch(w + kAhead + line);
      PL_UNROLL
      for (int i = 0; i < H; i += 2) {
        const __m256i w0 = load_8(w + 32 * i), w1 = load_8(w + 32 * i + 32);
        const __m256i v0 = load_8(w + 32 * i + 128), v1 = load_8(w + 32 * i + 160);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i x = broadcast_4(a + r * s), y = broadcast_4(a + r * s + 4);
          add_fours(sum[r][i], w0, x, v0, y);
          add_fours(sum[r][i + 1], w1, x, v1, y);
        }
      }
    }
    if (units == 0) return;
    // columns of a last unit without a second
    const __m256i none = _mm256_setzero_si256();
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < H; ++i) add_fours(sum[r][i], load_8(w + 32 * i), broadcast_4(a + r * s), none, none);
  }
#endif

  // what the weights' offset of 128 added is taken away, and the weights' own scales
  template <int R>
  PL_INLINE void scale(const GemmArgs& g, int64_t row, int64_t panel, vf (&out)[2 * R]) {
    const int64_t count = groups(g.w);
    const vf s0 = load(g.w.scale + panel * kPanel), s1 = load(g.w.scale + panel * kPanel + 16);
    for (int r = 0; r < R; ++r) {
      const vf offset = set1(g.a_scale[(row + r) * (count + 1) + count]);
      out[2 * r] = mul(sub(out[2 * r], offset), s0);
      out[2 * r + 1] = mul(sub(out[2 * r + 1], offset), s1);
    }
  }
};

// Rows times what blocks of a K kind were unpacked to. The bytes are below 64, so four products of a lane fit 16 bits
// whatever they are.
constexpr int kBlockTileRows = TileI8::rows;

template <class K, int R, int H>
PL_INLINE void multiply_half(const GemmArgs& g, int64_t row, int64_t block, int64_t count, const uint8_t* bytes,
                             const float (*steps)[kPanel], const float (*lows)[kPanel], int first, Sums* sums) {
  const int64_t groups = g.w.columns / kGroup, s = g.a_stride;
  const uint8_t* a = g.a + row * s + block * kBlock;
  const float* scales = g.a_scale + row * kActScales * groups + block * kGroupsOfBlock;
  bytes += first * 4;
  for (int64_t k = 0; k < count * kGroupsOfBlock * K::parts; ++k) {
    leave_registers(sums);
    const float* own = scales + k / K::parts;
    __m256i sum[R][H];
    if constexpr (K::parts == 1) {
      clear(sum);
    } else {
      const float* offsets = g.a_scale + (row * kActScales + 2) * groups + block * (kBlock / 16) + k;
      PL_UNROLL
      for (int r = 0; r < R; ++r)
        PL_UNROLL
        for (int i = 0; i < H; ++i) sum[r][i] = broadcast_4(offsets + r * kActScales * groups);
    }
    if constexpr (K::nibbles) {
      multiply_nibbles<R, H>(bytes, a, s, sum);
      bytes += k % kGroupsOfBlock == kGroupsOfBlock - 1 ? kNibbleBytes + kQ4KNibbles : kNibbleBytes;
      for (auto& of_row : sum)
        for (__m256i& each : of_row) each = widen(each);
    } else {
      TileI8::multiply<R, H, false>(bytes, a, s, 8 / K::parts, sum);
      bytes += 8 / K::parts * 128;
    }
    a += kGroup / K::parts;
    PL_UNROLL
    for (int i = 0; i < H; ++i) {
      const __m256 step = _mm256_load_ps(steps[k] + first + 8 * i);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        float* out = sums[r] + first + 8 * i;
        const __m256 x = _mm256_set1_ps(own[r * kActScales * groups]);
        __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][i]), _mm256_mul_ps(step, x), _mm256_load_ps(out));
        if constexpr (K::parts == 1)
          y = _mm256_fmadd_ps(_mm256_load_ps(lows[k] + first + 8 * i), _mm256_set1_ps(own[(r * kActScales + 1) * groups]), y);
        _mm256_store_ps(out, y);
      }
    }
  }
}

template <class K, int R, class In>
static __attribute__((noinline)) void multiply_blocks(const GemmArgs& g, int64_t row, int64_t block, int64_t count,
                                                      const In& in, Sums* sums) {
  const uint8_t* bytes = K::nibbles ? in.nibbles : in.bytes;
  if constexpr (R <= 2) {
    multiply_half<K, R, 4>(g, row, block, count, bytes, in.steps, in.lows, 0, sums);
  } else {
    multiply_half<K, R, 2>(g, row, block, count, bytes, in.steps, in.lows, 0, sums);
    multiply_half<K, R, 2>(g, row, block, count, bytes, in.steps, in.lows, 16, sums);
  }
}

// float32 and bfloat16 weights, activations in float32. All sums stay in registers from the first column to the last.
template <Weights Kind>
struct TileFloat {
  static constexpr int rows = 6;
  // lines of the next panel are asked for every so many units
  static constexpr int64_t group_units = 8;
  static constexpr int columns = Kind == Weights::kF32 ? 1 : 2;
  PL_INLINE int64_t groups(const Panels& w) { return (w.units + group_units - 1) / group_units; }

  template <int R, int H>
  PL_INLINE void run(const GemmArgs& g, int64_t row, const uint8_t* w, int first, NextPanel next, Sums* sums) {
    const float* a = reinterpret_cast<const float*>(g.a + row * g.a_stride);
    const int64_t s = g.a_stride / 4;
    __m256 sum[R][H];
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < H; ++i) sum[r][i] = _mm256_setzero_ps();
    w += first * 4;
    for (int64_t left = g.w.units; left > 0; left -= group_units) {
      if constexpr (H == 2) next.step();
      const int64_t units = left < group_units ? left : group_units;
      for (int64_t u = 0; u < units; ++u, w += 128, a += columns) unit<R, H>(w, a, s, sum);
    }
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < H; ++i) _mm256_store_ps(sums[r] + first + 8 * i, sum[r][i]);
  }

  template <int R, int H>
  PL_INLINE void unit(const uint8_t* w, const float* a, int64_t s, __m256 (&sum)[R][H]) {
    if constexpr (H == 4) prefetch(w + kAhead), prefetch(w + kAhead + 64);
    PL_UNROLL
    for (int c = 0; c < columns; ++c) {
      PL_UNROLL
      for (int i = 0; i < H; i += 2) {
        const __m256 w0 = weight(w + 32 * i, c), w1 = weight(w + 32 * i + 32, c);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256 x = _mm256_broadcast_ss(a + r * s + c);
          sum[r][i] = _mm256_fmadd_ps(x, w0, sum[r][i]);
          sum[r][i + 1] = _mm256_fmadd_ps(x, w1, sum[r][i + 1]);
        }
      }
    }
  }

  // column c of a unit, of eight outputs
  PL_INLINE __m256 weight(const uint8_t* w, int c) {
    if constexpr (Kind == Weights::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(w));
    return pair_column(load_8(w), c);
  }

  template <int R>
  PL_INLINE void scale(const GemmArgs&, int64_t, int64_t, vf (&)[2 * R]) {}
};

// Not inlined, so that each has its loops for itself, which tests look at.
template <class T, int R>
static __attribute__((noinline)) void tile_256(const GemmArgs& g, int64_t row, int64_t panel, NextPanel next) {
  expect(g, R, row, panel);
  const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
  alignas(64) Sums sums[R];
  memset(sums, 0, sizeof sums);
  if constexpr (R <= 2) {
    T::template run<R, 4>(g, row, w, 0, next, sums);
  } else {
    T::template run<R, 2>(g, row, w, 0, next, sums);
    next.at += next.lines * 64 * T::groups(g.w);
    T::template run<R, 2>(g, row, w, 16, next, sums);
  }
  vf out[2 * R];
  for (int i = 0; i < 2 * R; ++i) out[i] = load(sums[i / 2] + i % 2 * 16);
  T::template scale<R>(g, row, panel, out);
  finish(g, out, R, row, panel);
}

template <class T, int R>
PL_INLINE void run_tile(const GemmArgs& g, int64_t row, int64_t panel, int rows, NextPanel next) {
  if constexpr (R > 1) {
    if (rows < R) return run_tile<T, R - 1>(g, row, panel, rows, next);
  }
  tile_256<T, R>(g, row, panel, next);
}

template <class T>
static void gemm_256(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  if (begin == end) return;
  // equal tiles rather than full ones and a thin rest
  const int64_t count = (end - begin + T::rows - 1) / T::rows;
  // tiles go through the panel twice
  const int64_t steps = 2 * count * T::groups(g.w) + 1;
  NextPanel next{g.w.data + (panel + 1) * g.w.panel_bytes, (g.w.panel_bytes / 64 + steps - 1) / steps};
  for (int64_t tiles = count; tiles > 0; --tiles) {
    const int rows = int((end - begin + tiles - 1) / tiles);
    run_tile<T, T::rows>(g, begin, panel, rows, next);
    next.at += 2 * next.lines * 64 * T::groups(g.w);
    begin += rows;
  }
}

}  // namespace PL_NAMESPACE
