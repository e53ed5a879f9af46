// Products of weights whose nibbles are places in a table of 16 numbers: IQ4_NL, IQ4_XS and MXFP4. A shuffle of bytes
// puts the numbers, raised to be positive, in the place of nibbles, and the products are those of bytes. What raising
// them added is the sum of activations times the rise, a whole number that sums begin with the negative of.
//
// Without an instruction for products of bytes two products share 16 bits, which do not hold those of so large
// numbers. So they are looked up in two parts of 4 bits, whose products fit as those of nibbles do, one after the
// other.
//
// Included by kernels.cpp behind gemm.h or gemm_avx2.h.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

// the numbers, raised; or the lower or the upper 4 bits of that
enum class Part { kWhole, kLower, kUpper };

struct alignas(16) Entries { uint8_t x[16]; };
constexpr Entries entries_of(const int8_t (&values)[16], int rise, Part part) {
  Entries found{};
  for (int i = 0; i < 16; ++i) {
    const int value = values[i] + rise;
    found.x[i] = uint8_t(part == Part::kWhole ? value : part == Part::kLower ? value & 15 : value >> 4);
  }
  return found;
}

template <Weights Kind>
struct Looked {
  static constexpr bool six = Kind == Weights::kIQ4XS, powers = Kind == Weights::kMXFP4;
  static constexpr int rise = powers ? 12 : PL_BYTE_DOTS ? 128 : 127;
  // of a group, about
  static constexpr int bytes = powers ? kMXFP4GroupBytes : kIQ4NLGroupBytes;
  static constexpr Entries whole = entries_of(powers ? kMXFP4Values : kIQ4Values, rise, Part::kWhole);
  static constexpr Entries lower = entries_of(powers ? kMXFP4Values : kIQ4Values, rise, Part::kLower);
  static constexpr Entries upper = entries_of(powers ? kMXFP4Values : kIQ4Values, rise, Part::kUpper);

  // nibbles of a group of a panel
  PL_INLINE_MEMBER static const uint8_t* nibbles(const uint8_t* w, int64_t group) {
    if (six) {
      const uint8_t* block = w + group / kGroupsOfBlock * kIQ4XSBlockBytes;
      return block + kIQ4XSNibbles + group % kGroupsOfBlock * kNibbleBytes;
    }
    return w + group * bytes;
  }

  // What a row's sums of a group begin with: -32 times the sum of its activations lies beside their scales, in halves
  PL_INLINE_MEMBER static int32_t start(const float* scales, int64_t groups, int64_t group) {
    int32_t halves[2];
    memcpy(halves, scales + 2 * groups + 2 * group, 8);
    return (halves[0] + halves[1]) / 32 * rise;
  }
};

#if PL_LEVEL == 1

PL_INLINE __m256i bytes_8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// 2 to the power of each less 128, as two factors that are normal numbers
PL_INLINE __m256 powers_8(__m256i e) {
  const __m256i one = _mm256_set1_epi32(1), bias = _mm256_set1_epi32(63);
  const __m256i half = _mm256_srli_epi32(e, 1), other = _mm256_srli_epi32(_mm256_add_epi32(e, one), 1);
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)),
                       _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(other, bias), 23)));
}

// Scales of 8 rows of a panel from `first` on, of a group.
template <Weights Kind>
PL_INLINE __m256 looked_scales(const uint8_t* w, int64_t group, int first) {
  using T = Looked<Kind>;
  if constexpr (!T::six) {
    const uint8_t* scales = T::nibbles(w, group) + kNibbleBytes;
    if constexpr (T::powers) return powers_8(bytes_8(scales + first));
    return half_8(scales + first * 2);
  } else {
    const uint8_t* block = w + group / kGroupsOfBlock * kIQ4XSBlockBytes;
    const int own = int(group % kGroupsOfBlock), odd = own % 2, other = first / 16;
    const uint8_t* pair = block + kIQ4XSScales + own / 2 * kIQ4XSPairBytes + first % 16;
    const __m256i low = _mm256_srl_epi32(bytes_8(pair + odd * 16), _mm_cvtsi32_si128(other * 4));
    const __m256i high = _mm256_srl_epi32(bytes_8(pair + 32), _mm_cvtsi32_si128(odd * 4 + other * 2));
    const __m256i scale = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                          _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
    return _mm256_mul_ps(half_8(block + first * 2),
                         _mm256_cvtepi32_ps(_mm256_sub_epi32(scale, _mm256_set1_epi32(32))));
  }
}

// Adds products of 32 columns, as `multiply_nibbles` does.
template <int R, int H>
PL_INLINE void multiply_looked(const Entries& entries, const uint8_t* w, const uint8_t* a, int64_t s,
                               __m256i (&sum)[R][H]) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries.x)));
  const __m256i mask = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; ++j, w += 128, a += 4) {
    PL_UNROLL
    for (int i = 0; i < H; ++i) {
      const __m256i both = load_8(w + 32 * i);
      const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(both, mask));
      const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
#if PL_BYTE_DOTS
        add_dots(sum[r][i], low, broadcast_4(a + r * s));
        add_dots(sum[r][i], high, broadcast_4(a + r * s + 16));
#else
        add_pairs(sum[r][i], low, broadcast_4(a + r * s));
        add_pairs(sum[r][i], high, broadcast_4(a + r * s + 16));
#endif
      }
    }
  }
}

// As TileQ4 of gemm_avx2.h.
template <Weights Kind>
struct TileLooked {
  static constexpr int rows = PL_BYTE_DOTS ? 4 : 2;
  PL_INLINE int64_t groups(const Panels& w) { return w.columns / kGroup; }

  template <int R, int H>
  PL_INLINE void run(const GemmArgs& g, int64_t row, const uint8_t* w, int first, NextPanel next, Sums* sums) {
    using T = Looked<Kind>;
    const int64_t groups = g.w.columns / kGroup, s = g.a_stride;
    const uint8_t* a = g.a + row * s;
    const float* scales = g.a_scale + row * kActScales * groups;
    for (int64_t k = 0; k < groups; ++k, a += kGroup) {
      leave_registers(sums);
      const uint8_t* nibbles = T::nibbles(w, k);
      if constexpr (H == 4)
        for (int line = 0; line < T::bytes; line += 64) prefetch(nibbles + kAhead + line);
      else
        next.step();
      __m256i sum[R][H];
#if PL_BYTE_DOTS
      PL_UNROLL
      for (int r = 0; r < R; ++r)
        PL_UNROLL
        for (int i = 0; i < H; ++i) sum[r][i] = _mm256_set1_epi32(T::start(scales + r * kActScales * groups, groups, k));
      multiply_looked<R, H>(T::whole, nibbles + first * 4, a, s, sum);
#else
      __m256i part[R][H];
      clear(part);
      multiply_looked<R, H>(T::lower, nibbles + first * 4, a, s, part);
      PL_UNROLL
      for (int r = 0; r < R; ++r)
        PL_UNROLL
        for (int i = 0; i < H; ++i)
          sum[r][i] = _mm256_add_epi32(_mm256_set1_epi32(T::start(scales + r * kActScales * groups, groups, k)),
                                       widen(part[r][i]));
      clear(part);
      multiply_looked<R, H>(T::upper, nibbles + first * 4, a, s, part);
      PL_UNROLL
      for (int r = 0; r < R; ++r)
        PL_UNROLL
        for (int i = 0; i < H; ++i)
          sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_slli_epi32(widen(part[r][i]), 4));
#endif
      PL_UNROLL
      for (int i = 0; i < H; ++i) {
        const __m256 step = looked_scales<Kind>(w, k, first + 8 * i);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          float* out = sums[r] + first + 8 * i;
          const __m256 x = _mm256_set1_ps(scales[r * kActScales * groups + k]);
          _mm256_store_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][i]), _mm256_mul_ps(step, x),
                                               _mm256_load_ps(out)));
        }
      }
    }
  }

  template <int R>
  PL_INLINE void scale(const GemmArgs&, int64_t, int64_t, vf (&)[2 * R]) {}
};

template <Weights Kind>
static void gemm_looked(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  gemm_256<TileLooked<Kind>>(g, begin, end, panel);
}

#else

#if PL_LEVEL >= 2
constexpr int kLookedRows = PL_BYTE_DOTS ? 5 : 3;
PL_INLINE vf as_floats(vi bits) { return _mm512_castsi512_ps(bits); }
PL_INLINE vi table_of(const uint8_t* entries) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
}
PL_INLINE vi look_up(vi table, vi places) { return _mm512_shuffle_epi8(table, places); }
#else
constexpr int kLookedRows = 1;
PL_INLINE vf as_floats(vi bits) { PL_LANES(vf, from_bits(uint32_t(bits.x[i]))); }
PL_INLINE vi table_of(const uint8_t* entries) {
  vi table = zeroi();
  memcpy(table.x, entries, 16);
  return table;
}
PL_INLINE vi look_up(vi table, vi places) {
  uint8_t entries[16], bytes[64];
  memcpy(entries, table.x, 16);
  memcpy(bytes, places.x, 64);
  for (uint8_t& byte : bytes) byte = entries[byte];
  return loadi(bytes);
}
#endif

// 2 to the power of each less 128, as two factors that are normal numbers
PL_INLINE vf powers_16(vi e) {
  const vi bias = set1i(63);
  const vf half = as_floats(up<23>(addi(down<1>(e), bias)));
  return mul(half, as_floats(up<23>(addi(down<1>(addi(e, set1i(1))), bias))));
}

// Scales of the first or the second 16 rows of a panel, of a group.
template <Weights Kind>
PL_INLINE vf looked_scales(const uint8_t* w, int64_t group, int other) {
  using T = Looked<Kind>;
  if constexpr (!T::six) {
    const uint8_t* scales = T::nibbles(w, group) + kNibbleBytes;
    if constexpr (T::powers) return powers_16(load_u8(scales + other * 16));
    return load_half(scales + other * 32);
  } else {
    const uint8_t* block = w + group / kGroupsOfBlock * kIQ4XSBlockBytes;
    const int own = int(group % kGroupsOfBlock), odd = own % 2;
    const uint8_t* pair = block + kIQ4XSScales + own / 2 * kIQ4XSPairBytes;
    const vi both = load_u8(pair + odd * 16), all = load_u8(pair + 32);
    const vi high = odd ? down<4>(all) : all;
    const vi six = ori(bits(other ? down<4>(both) : both, 15), up<4>(bits(other ? down<2>(high) : high, 3)));
    return mul(load_half(block + other * 32), to_float(addi(six, set1i(-32))));
  }
}

// Adds products of 32 columns to sums in 32 bits, or without byte dots in 16.
template <int R>
PL_INLINE void add_looked(vi (&acc)[2 * R], vi table, const uint8_t* w, const uint8_t* a, int64_t stride) {
  for (int j = 0; j < 4; ++j, w += 128, a += 4) {
    const vi both0 = loadi(w), both1 = loadi(w + 64);
    const vi l0 = look_up(table, low_nibbles(both0)), h0 = look_up(table, high_nibbles(both0));
    const vi l1 = look_up(table, low_nibbles(both1)), h1 = look_up(table, high_nibbles(both1));
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vi x = set1i(int32_t(load_u32(a + r * stride))), y = set1i(int32_t(load_u32(a + r * stride + 16)));
      acc[2 * r] = dot_nibbles(acc[2 * r], l0, x);
      acc[2 * r + 1] = dot_nibbles(acc[2 * r + 1], l1, x);
      acc[2 * r] = dot_nibbles(acc[2 * r], h0, y);
      acc[2 * r + 1] = dot_nibbles(acc[2 * r + 1], h1, y);
    }
  }
}

template <Weights Kind, int R>
static void tile_looked(const GemmArgs& g, int64_t row, int64_t panel) {
  using T = Looked<Kind>;
  expect(g, R, row, panel);
  const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
  const int64_t groups = g.w.columns / kGroup, s = g.a_stride;
  const uint8_t* a = g.a + row * s;
  const float* scales = g.a_scale + row * kActScales * groups;
  vf out[2 * R];
  PL_UNROLL
  for (int i = 0; i < 2 * R; ++i) out[i] = zero();
  for (int64_t k = 0; k < groups; ++k, a += kGroup) {
    const uint8_t* nibbles = T::nibbles(w, k);
    for (int line = 0; line < T::bytes; line += 64) prefetch(nibbles + kAhead + line);
    vi acc[2 * R];
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) acc[i] = set1i(T::start(scales + i / 2 * kActScales * groups, groups, k));
#if PL_BYTE_DOTS
    add_looked<R>(acc, table_of(T::whole.x), nibbles, a, s);
#else
    vi part[2 * R];
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) part[i] = zeroi();
    add_looked<R>(part, table_of(T::lower.x), nibbles, a, s);
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) acc[i] = addi(acc[i], widen(part[i])), part[i] = zeroi();
    add_looked<R>(part, table_of(T::upper.x), nibbles, a, s);
    PL_UNROLL
    for (int i = 0; i < 2 * R; ++i) acc[i] = addi(acc[i], up<4>(widen(part[i])));
#endif
    const vf s0 = looked_scales<Kind>(w, k, 0), s1 = looked_scales<Kind>(w, k, 1);
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf x = set1(scales[r * kActScales * groups + k]);
      out[2 * r] = fma(to_float(acc[2 * r]), mul(s0, x), out[2 * r]);
      out[2 * r + 1] = fma(to_float(acc[2 * r + 1]), mul(s1, x), out[2 * r + 1]);
    }
  }
  finish(g, out, R, row, panel);
}

template <Weights Kind, int R>
static void run_looked(const GemmArgs& g, int64_t row, int64_t panel, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return run_looked<Kind, R - 1>(g, row, panel, rows);
  }
  tile_looked<Kind, R>(g, row, panel);
}

template <Weights Kind>
static void gemm_looked(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  for (int64_t tiles = (end - begin + kLookedRows - 1) / kLookedRows; tiles > 0; --tiles) {
    const int rows = int((end - begin + tiles - 1) / tiles);
    run_looked<Kind, kLookedRows>(g, begin, panel, rows);
    begin += rows;
  }
}

#endif

}  // namespace PL_NAMESPACE
