// Sixteen lanes of float32 or int32, whatever the register width below: simd_*.h has a file for each.
//
// Included once per instruction-set translation unit, inside that unit's own namespace, so that no
// symbol compiled for a newer machine can be picked up by code meant for an older one. For the same
// reason nothing here may instantiate a standard-library template.
//
// PL_LEVEL: 0 portable C++, 1 AVX2+FMA+F16C, 2 AVX-512 (F, BW, DQ, VL), 3 level 2 + BF16. 1 and 2 are compiled
// with and without VNNI; PL_STAND_IN puts C++ in the place of that.
#pragma once
#include <cstdint>
#include <cstring>
#if PL_LEVEL >= 1
#include <immintrin.h>
#endif

#include "convert.h"

// Whether the sum of four products of bytes comes in 32 bits. If not, several products share 16 bits, and what is
// encoded must see to it that they fit.
#if PL_LEVEL == 0 || defined(__AVXVNNI__) || defined(__AVX512VNNI__) || defined(PL_STAND_IN)
#define PL_BYTE_DOTS 1
#else
#define PL_BYTE_DOTS 0
#endif
#define PL_INLINE_MEMBER inline __attribute__((always_inline))
#define PL_INLINE_LAMBDA __attribute__((always_inline))
// register arrays stay in registers only if every loop over them is unrolled
#define PL_UNROLL _Pragma("GCC unroll 32")

namespace PL_NAMESPACE {
using namespace paceline;

// bring the line of p close; p may be any address
PL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PL_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
PL_INLINE void prefetch_for_write(const void* p) { __builtin_prefetch(p, 1, 3); }

PL_INLINE uint32_t load_u32(const void* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

}  // namespace PL_NAMESPACE

#if PL_LEVEL >= 2
#include "simd_avx512.h"
#elif PL_LEVEL == 1
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace PL_NAMESPACE {

// (2^f - 1) / f for |f| <= 1/2, by its series, of which p is what is beyond five terms
PL_INLINE vf exp2_slope(vf f, vf p) {
  p = fma(p, f, set1(1.3333558e-3f));
  p = fma(p, f, set1(9.6181291e-3f));
  p = fma(p, f, set1(5.5504109e-2f));
  p = fma(p, f, set1(2.4022651e-1f));
  return fma(p, f, set1(6.9314718e-1f));
}

// 2 to the power n + f for a whole n and |f| <= 1/2; relative error below 2e-7 for |n| <= 126
PL_INLINE vf exp2_parts(vf n, vf f) {
  return scale_by_power(fma(exp2_slope(f, set1(1.5403530e-4f)), f, set1(1.0f)), n);
}

// 2 to the power x, clamped to |x| <= 126
PL_INLINE vf exp2v(vf x) {
  x = vmin(vmax(x, set1(-126.0f)), set1(126.0f));
  const vf n = round_even(x);
  return exp2_parts(n, sub(x, n));
}

// 2 to the power x for x up to about 0, of which eight bits are kept: relative error below 1.1e-4, and as
// good as 0 below -126
PL_INLINE vf exp2_down(vf x) {
#if PL_LEVEL < 2
  x = vmax(x, set1(-126.0f));
#endif
  const vf n = round_even(x);
  const vf f = sub(x, n);
  vf p = set1(5.50083660e-2f);
  p = fma(p, f, set1(0.242209847f));
  p = fma(p, f, set1(0.693282866f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power(p, n);
}

PL_INLINE vf silu(vf x) {
  return div(x, add(set1(1.0f), exp2v(mul(x, set1(-1.4426950408889634f)))));
}

// GELU by tanh: x (1 + tanh(z)) / 2 is x / (1 + e^(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
PL_INLINE vf gelu(vf x) {
  const vf z = mul(x, add(set1(1.0f), mul(set1(0.044715f), mul(x, x))));
  return div(x, add(set1(1.0f), exp2v(mul(z, set1(-2.3022081985f)))));
}

// cap * tanh(x / cap), for `factor` = kSoftCapFactor / cap; relative error below 5e-7, and NaN stays. tanh(z) is
// t / (t + 2) with t = e^(2z) - 1, which is computed as such: a difference would lose the digits of a small x.
constexpr float kSoftCapFactor = 2 * 1.4426950408889634f;
PL_INLINE vf soft_cap(vf x, vf cap, vf factor) {
  // where e^(2z) is 2^30 or more tanh is 1 in float32; what is not a number stays so as the second of the two
  const vf y = vmin(set1(30.0f), vmax(set1(-30.0f), mul(x, factor)));
  const vf n = round_even(y), f = sub(y, n), power = scale_by_power(set1(1.0f), n);
  const vf slope = exp2_slope(f, fma(set1(1.5252734e-5f), f, set1(1.5403530e-4f)));
  const vf t = fma(mul(slope, f), power, sub(power, set1(1.0f)));
  return mul(cap, div(t, add(t, set1(2.0f))));
}

// Products of one 32-bit unit: one float, two bf16, or four bytes against a packed weight vector.
// `Weight` and `Value` hold whatever is worth preparing once per register load.

struct DotF32 {
  using Acc = vf;
  using Weight = vf;
  using Value = vf;
  static constexpr int per_unit = 1;
  PL_INLINE vf none() { return zero(); }
  PL_INLINE Weight weight(const void* p) { return load(static_cast<const float*>(p)); }
  PL_INLINE Value value(const void* p) {
    float x;
    memcpy(&x, p, 4);
    return set1(x);
  }
  PL_INLINE vf dot(vf acc, Value x, Weight w) { return fma(x, w, acc); }
};

struct DotBF16 {
  using Acc = vf;
  static constexpr int per_unit = 2;
  PL_INLINE vf none() { return zero(); }
#if PL_LEVEL >= 3
  using Weight = vi;
  using Value = vi;
  PL_INLINE Weight weight(const void* p) { return loadi(p); }
  PL_INLINE Value value(const void* p) { return set1i(int32_t(load_u32(p))); }
  PL_INLINE vf dot(vf acc, Value x, Weight w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
  }
#else
  struct Weight { vf low, high; };
  struct Value { vf low, high; };
  PL_INLINE Weight weight(const void* p) {
#if PL_LEVEL == 2
    const vi w = loadi(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(w, set1i(int32_t(0xffff0000u))))};
#elif PL_LEVEL == 1
    const vi w = loadi(p);
    const __m256i m = _mm256_set1_epi32(int32_t(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(w.a, m)), _mm256_castsi256_ps(_mm256_and_si256(w.b, m))}};
#else
    Weight r;
    for (int i = 0; i < 16; ++i) {
      r.low.x[i] = bf16_to_float(u16_at(p, 2 * i));
      r.high.x[i] = bf16_to_float(u16_at(p, 2 * i + 1));
    }
    return r;
#endif
  }
  PL_INLINE Value value(const void* p) {
    const uint32_t x = load_u32(p);
    return {set1(bf16_to_float(uint16_t(x & 0xffffu))), set1(bf16_to_float(uint16_t(x >> 16)))};
  }
  PL_INLINE vf dot(vf acc, Value x, Weight w) { return fma(x.high, w.high, fma(x.low, w.low, acc)); }
#endif
};

}  // namespace PL_NAMESPACE
