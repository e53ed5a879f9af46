// Sixteen lanes of float32 or int32, whatever the register width below.
//
// Included once per instruction-set translation unit, inside that unit's own namespace, so that no
// symbol compiled for a newer machine can be picked up by code meant for an older one. For the same
// reason nothing here may instantiate a standard-library template.
//
// PL_LEVEL: 0 portable C++, 1 AVX2+FMA+F16C, 2 AVX-512 (F, BW, DQ, VL) + VNNI, 3 level 2 + BF16.
#pragma once
#include <cstdint>
#include <cstring>
#if PL_LEVEL >= 1
#include <immintrin.h>
#endif

namespace PL_NAMESPACE {

#define PL_INLINE static inline __attribute__((always_inline))
#define PL_INLINE_MEMBER inline __attribute__((always_inline))
#define PL_INLINE_LAMBDA __attribute__((always_inline))
// register arrays stay in registers only if every loop over them is unrolled
#define PL_UNROLL _Pragma("GCC unroll 32")

// bring the line of p close; p may be any address
PL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PL_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
PL_INLINE void prefetch_for_write(const void* p) { __builtin_prefetch(p, 1, 3); }

PL_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PL_INLINE float bf16_to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

PL_INLINE uint32_t load_u32(const void* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

#if PL_LEVEL >= 2
// ------------------------------------------------------------------------------------- AVX-512
using vf = __m512;
using vi = __m512i;
PL_INLINE vf zero() { return _mm512_setzero_ps(); }
PL_INLINE vi zeroi() { return _mm512_setzero_si512(); }
PL_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
PL_INLINE vi set1i(int32_t x) { return _mm512_set1_epi32(x); }
PL_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
PL_INLINE vi loadi(const void* p) { return _mm512_loadu_si512(p); }
PL_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
PL_INLINE vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
PL_INLINE void store_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }
PL_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
PL_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PL_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PL_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
PL_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
PL_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
PL_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
PL_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PL_INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
PL_INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
PL_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
PL_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
PL_INLINE vf round_even(vf a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PL_INLINE vf scale_by_power(vf a, vf n) { return _mm512_scalef_ps(a, n); }
// lane i: a[i] + a[i ^ S], or a[i ^ S] - a[i] where i has the bit S; S is 1, 2, 4 or 8
template <int S>
PL_INLINE vf butterfly(vf a) {
  constexpr __mmask16 upper = S == 1 ? 0xaaaa : S == 2 ? 0xcccc : S == 4 ? 0xf0f0 : 0xff00;
  const vf sign = _mm512_mask_blend_ps(upper, set1(1.0f), set1(-1.0f));
  if constexpr (S <= 2) return _mm512_fmadd_ps(a, sign, _mm512_permute_ps(a, S == 1 ? 0xb1 : 0x4e));
  return _mm512_fmadd_ps(a, sign, _mm512_shuffle_f32x4(a, a, S == 4 ? 0xb1 : 0x4e));
}
// lanes [lo, hi) of a, `fill` elsewhere
PL_INLINE vf keep(vf a, int lo, int hi, float fill) {
  lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
  hi = hi < 0 ? 0 : hi > 16 ? 16 : hi;
  const uint32_t mask = ((1u << hi) - 1) & ~((1u << lo) - 1);
  return _mm512_mask_blend_ps(__mmask16(mask), set1(fill), a);
}
// a bit for each lane where a >= b
PL_INLINE uint32_t at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// x in the lanes where a >= b, 0 in the others
PL_INLINE vf where_at_least(vf a, vf b, vf x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x);
}
// sum + x in the lanes where x >= t, and so many more in count
PL_INLINE vf add_at_least(vf sum, vf x, vf t, int64_t* count) {
  const __mmask16 m = _mm512_cmp_ps_mask(x, t, _CMP_GE_OQ);
  *count += __builtin_popcount(m);
  return _mm512_mask_add_ps(sum, m, sum, x);
}
PL_INLINE vf load_half(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
PL_INLINE vf load_bf16(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}
PL_INLINE void store_bf16(void* p, vf x) {
#if PL_LEVEL >= 3
  _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
#else
  const vi bits = _mm512_castps_si512(x);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set1i(1));
  const vi up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, set1i(0x7fff)));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
#endif
}
// int32 lanes, already within range, to 16 bytes
PL_INLINE void store_bytes(void* p, vi x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
PL_INLINE vf load_s8(const void* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
PL_INLINE vi addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
PL_INLINE vi low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
PL_INLINE vi high_nibbles(vi a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
// acc + sum of four products of unsigned bytes (u, below 16 or any) and signed bytes (s) per lane
// The intrinsic makes gcc 12 spill every accumulator of a large tile: it converts the vector's
// element type back and forth, and the array no longer dissolves into registers.
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "vm"(s));
  return acc;
}
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) { return dot_bytes(acc, u, s); }

#elif PL_LEVEL == 1
// ---------------------------------------------------------------------------------------- AVX2
struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
#define PL_EACH(type, op, ...) type{op(__VA_ARGS__)}
PL_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PL_INLINE vi zeroi() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PL_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PL_INLINE vi set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PL_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PL_INLINE vi loadi(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
PL_INLINE void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PL_INLINE vf load_n(const float* p, int n) {
  float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
PL_INLINE void store_n(float* p, vf x, int n) {
  float t[16];
  store(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
PL_INLINE vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PL_INLINE vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PL_INLINE vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PL_INLINE vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PL_INLINE vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PL_INLINE vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PL_INLINE vf vabs(vf x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
PL_INLINE vf fma(vf x, vf y, vf z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PL_INLINE float hsum(vf x) {
  float t[16], s = 0;
  store(t, x);
  for (float v : t) s += v;
  return s;
}
PL_INLINE float hmax(vf x) {
  float t[16];
  store(t, x);
  float m = t[0];
  for (float v : t) m = v > m ? v : m;
  return m;
}
PL_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PL_INLINE vi to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
PL_INLINE vf round_even(vf x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
PL_INLINE __m256 scale_by_power(__m256 x, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
PL_INLINE vf scale_by_power(vf x, vf n) { return {scale_by_power(x.a, n.a), scale_by_power(x.b, n.b)}; }
template <int S>
PL_INLINE __m256 butterfly_8(__m256 x) {
  constexpr float u1 = S == 1 ? -1 : 1, u2 = S == 2 ? -1 : 1, u4 = S == 4 ? -1 : 1;
  const __m256 sign = _mm256_setr_ps(1, u1, u2, u1 * u2, u4, u4 * u1, u4 * u2, u4 * u1 * u2);
  if constexpr (S <= 2) return _mm256_fmadd_ps(x, sign, _mm256_permute_ps(x, S == 1 ? 0xb1 : 0x4e));
  return _mm256_fmadd_ps(x, sign, _mm256_permute2f128_ps(x, x, 1));
}
// lane i: x[i] + x[i ^ S], or x[i ^ S] - x[i] where i has the bit S; S is 1, 2, 4 or 8
template <int S>
PL_INLINE vf butterfly(vf x) {
  if constexpr (S == 8) return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  return {butterfly_8<S>(x.a), butterfly_8<S>(x.b)};
}
PL_INLINE vf keep(vf x, int lo, int hi, float fill) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) t[i] = i >= lo && i < hi ? t[i] : fill;
  return load(t);
}
PL_INLINE uint32_t at_least(vf x, vf y) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) << 8;
}
PL_INLINE vf where_at_least(vf x, vf y, vf z) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), z.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), z.b)};
}
PL_INLINE vf add_at_least(vf sum, vf x, vf t, int64_t* count) {
  *count += __builtin_popcount(at_least(x, t));
  return add(sum, where_at_least(x, t, x));
}
PL_INLINE vf load_half(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
PL_INLINE __m256 load_bf16_8(const __m128i* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
PL_INLINE vf load_bf16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {load_bf16_8(q), load_bf16_8(q + 1)};
}
PL_INLINE __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_srli_epi32(up, 16);
}
PL_INLINE void store_bf16(void* p, vf x) {
  const __m256i both = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
PL_INLINE void store_bytes(void* p, vi x) {
  int32_t t[16];
  memcpy(t, &x, 64);
  uint8_t* q = static_cast<uint8_t*>(p);
  for (int i = 0; i < 16; ++i) q[i] = uint8_t(t[i]);
}
PL_INLINE vf load_s8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return to_float(vi{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
PL_INLINE vi addi(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PL_INLINE vi low_nibbles(vi x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
PL_INLINE vi high_nibbles(vi x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
// vpmaddubsw would saturate (255 * 127 * 2 > 32767), so even and odd bytes go through 16-bit products
PL_INLINE __m256i dot_bytes_8(__m256i acc, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  return {dot_bytes_8(acc.a, u.a, s.a), dot_bytes_8(acc.b, u.b, s.b)};
}
// nibbles are below 16: 15 * 127 * 2 fits 16 bits
PL_INLINE __m256i dot_nibbles_8(__m256i acc, __m256i u, __m256i s) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) {
  return {dot_nibbles_8(acc.a, u.a, s.a), dot_nibbles_8(acc.b, u.b, s.b)};
}

#else
// ------------------------------------------------------------------------------------ portable
struct vf { float x[16]; };
struct vi { int32_t x[16]; };
#define PL_LANES(type, expr)                       \
  type r;                                          \
  for (int i = 0; i < 16; ++i) r.x[i] = (expr);    \
  return r
PL_INLINE vf zero() { PL_LANES(vf, 0); }
PL_INLINE vi zeroi() { PL_LANES(vi, 0); }
PL_INLINE vf set1(float v) { PL_LANES(vf, v); }
PL_INLINE vi set1i(int32_t v) { PL_LANES(vi, v); }
PL_INLINE vf load(const float* p) { PL_LANES(vf, p[i]); }
PL_INLINE vi loadi(const void* p) {
  vi r;
  memcpy(r.x, p, 64);
  return r;
}
PL_INLINE void store(float* p, vf a) { memcpy(p, a.x, 64); }
PL_INLINE vf load_n(const float* p, int n) { PL_LANES(vf, i < n ? p[i] : 0); }
PL_INLINE void store_n(float* p, vf a, int n) { memcpy(p, a.x, size_t(n) * 4); }
PL_INLINE vf add(vf a, vf b) { PL_LANES(vf, a.x[i] + b.x[i]); }
PL_INLINE vf sub(vf a, vf b) { PL_LANES(vf, a.x[i] - b.x[i]); }
PL_INLINE vf mul(vf a, vf b) { PL_LANES(vf, a.x[i] * b.x[i]); }
PL_INLINE vf div(vf a, vf b) { PL_LANES(vf, a.x[i] / b.x[i]); }
PL_INLINE vf vmax(vf a, vf b) { PL_LANES(vf, a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
PL_INLINE vf vmin(vf a, vf b) { PL_LANES(vf, a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
PL_INLINE vf vabs(vf a) { PL_LANES(vf, __builtin_fabsf(a.x[i])); }
PL_INLINE vf fma(vf a, vf b, vf c) { PL_LANES(vf, a.x[i] * b.x[i] + c.x[i]); }
PL_INLINE float hsum(vf a) {
  float s = 0;
  for (float v : a.x) s += v;
  return s;
}
PL_INLINE float hmax(vf a) {
  float m = a.x[0];
  for (float v : a.x) m = v > m ? v : m;
  return m;
}
PL_INLINE vf to_float(vi a) { PL_LANES(vf, float(a.x[i])); }
PL_INLINE vi to_int(vf a) { PL_LANES(vi, int32_t(__builtin_rintf(a.x[i]))); }
PL_INLINE vf round_even(vf a) { PL_LANES(vf, __builtin_rintf(a.x[i])); }
PL_INLINE vf scale_by_power(vf a, vf n) { PL_LANES(vf, __builtin_ldexpf(a.x[i], int(n.x[i]))); }
// lane i: a[i] + a[i ^ S], or a[i ^ S] - a[i] where i has the bit S; S is 1, 2, 4 or 8
template <int S>
PL_INLINE vf butterfly(vf a) {
  PL_LANES(vf, i & S ? a.x[i ^ S] - a.x[i] : a.x[i] + a.x[i ^ S]);
}
PL_INLINE vf keep(vf a, int lo, int hi, float fill) { PL_LANES(vf, i >= lo && i < hi ? a.x[i] : fill); }
PL_INLINE uint32_t at_least(vf a, vf b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= uint32_t(a.x[i] >= b.x[i]) << i;
  return bits;
}
PL_INLINE vf where_at_least(vf a, vf b, vf c) { PL_LANES(vf, a.x[i] >= b.x[i] ? c.x[i] : 0); }
PL_INLINE vf add_at_least(vf sum, vf x, vf t, int64_t* count) {
  for (int i = 0; i < 16; ++i) *count += x.x[i] >= t.x[i];
  return add(sum, where_at_least(x, t, x));
}
PL_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, rest = h & 1023u;
  if (exponent == 0) {
    const float v = float(rest) * 5.9604644775390625e-8f;
    return sign ? -v : v;
  }
  const uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (rest << 13);
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
PL_INLINE uint16_t u16_at(const void* p, int i) {
  uint16_t x;
  memcpy(&x, static_cast<const uint8_t*>(p) + 2 * i, 2);
  return x;
}
PL_INLINE vf load_half(const void* p) { PL_LANES(vf, half_to_float(u16_at(p, i))); }
PL_INLINE vf load_bf16(const void* p) { PL_LANES(vf, bf16_to_float(u16_at(p, i))); }
PL_INLINE void store_bf16(void* p, vf a) {
  for (int i = 0; i < 16; ++i) {
    const uint16_t h = float_to_bf16(a.x[i]);
    memcpy(static_cast<uint8_t*>(p) + 2 * i, &h, 2);
  }
}
PL_INLINE void store_bytes(void* p, vi a) {
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(p)[i] = uint8_t(a.x[i]);
}
PL_INLINE vf load_s8(const void* p) { PL_LANES(vf, float(static_cast<const int8_t*>(p)[i])); }
PL_INLINE vi addi(vi a, vi b) { PL_LANES(vi, a.x[i] + b.x[i]); }
PL_INLINE vi low_nibbles(vi a) { PL_LANES(vi, a.x[i] & 0x0f0f0f0f); }
PL_INLINE vi high_nibbles(vi a) { PL_LANES(vi, int32_t((uint32_t(a.x[i]) >> 4) & 0x0f0f0f0fu)); }
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  for (int i = 0; i < 16; ++i)
    for (int b = 0; b < 32; b += 8)
      acc.x[i] += int32_t((uint32_t(u.x[i]) >> b) & 255u) * int8_t((uint32_t(s.x[i]) >> b) & 255u);
  return acc;
}
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) { return dot_bytes(acc, u, s); }
#endif

// 2 to the power n + f for a whole n and |f| <= 1/2; relative error below 2e-7 for |n| <= 126
PL_INLINE vf exp2_parts(vf n, vf f) {
  vf p = set1(1.5403530e-4f);
  p = fma(p, f, set1(1.3333558e-3f));
  p = fma(p, f, set1(9.6181291e-3f));
  p = fma(p, f, set1(5.5504109e-2f));
  p = fma(p, f, set1(2.4022651e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power(p, n);
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
