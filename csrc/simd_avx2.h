// Sixteen lanes in two AVX2 registers. Included by simd.h.
#pragma once

namespace PL_NAMESPACE {

struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
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
// the sums of four
PL_INLINE void hsum_four(const vf* a, float* out) {
  __m256 half[4];
  PL_UNROLL
  for (int i = 0; i < 4; ++i) half[i] = _mm256_add_ps(a[i].a, a[i].b);
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
PL_INLINE float hsum(vf x) {
  const __m256 y = _mm256_add_ps(x.a, x.b);
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
PL_INLINE float hmax_8(__m256 y) {
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
PL_INLINE float hmax(vf x) { return hmax_8(_mm256_max_ps(x.a, x.b)); }
// Sums of the lanes i, i + 1, i + 4 and i + 5 of eight, for i = 0 and 2, in any order and more than once.
PL_INLINE __m256 sums_of_four(__m256 a, __m256 b) {
  const __m256 pairs = _mm256_hadd_ps(a, b);
  return _mm256_add_ps(pairs, _mm256_permute2f128_ps(pairs, pairs, 1));
}
PL_INLINE vf sums_of_four(vf x) {
  const __m256 sums = sums_of_four(x.a, x.b);
  return {sums, sums};
}
// Of n times 16 values, the largest sum of the positive, or size of the negative, ones of such four, or of pairs
// of neighbours.
template <int Together>
PL_INLINE float largest_sum(const vf* v, int n) {
  static_assert(Together == 2 || Together == 4);
  const __m256 none = _mm256_setzero_ps();
  __m256 high = none, low = none;
  for (int i = 0; i < n; ++i) {
    const __m256 up_a = _mm256_max_ps(v[i].a, none), up_b = _mm256_max_ps(v[i].b, none);
    const __m256 down_a = _mm256_min_ps(v[i].a, none), down_b = _mm256_min_ps(v[i].b, none);
    high = _mm256_max_ps(high, Together == 4 ? sums_of_four(up_a, up_b) : _mm256_hadd_ps(up_a, up_b));
    low = _mm256_min_ps(low, Together == 4 ? sums_of_four(down_a, down_b) : _mm256_hadd_ps(down_a, down_b));
  }
  return hmax_8(_mm256_max_ps(high, _mm256_sub_ps(none, low)));
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
PL_INLINE vf load_bf16_low(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
PL_INLINE vf load_bf16_high(const void* p) {
  const __m256i *q = static_cast<const __m256i*>(p), high = _mm256_set1_epi32(int(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), high))};
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
  const __m256i byte = _mm256_set1_epi32(255);
  // lanes 0-3, 8-11, 4-7, 12-15 in 16 bits
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, byte), _mm256_and_si256(x.b, byte));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
PL_INLINE vf load_s8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return to_float(vi{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
PL_INLINE vi addi(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PL_INLINE void storei(void* p, vi x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
PL_INLINE vi ori(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
// these bits of every byte
PL_INLINE vi bits(vi x, int of_byte) {
  const __m256i mask = _mm256_set1_epi8(char(of_byte));
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
template <int N>
PL_INLINE vi up(vi x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N>
PL_INLINE vi down(vi x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
// 16 unsigned bytes
PL_INLINE vi load_u8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
PL_INLINE vi low_nibbles(vi x) { return bits(x, 15); }
PL_INLINE vi high_nibbles(vi x) { return bits(down<4>(x), 15); }
}  // namespace PL_NAMESPACE
