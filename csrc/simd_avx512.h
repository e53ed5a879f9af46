// Sixteen lanes in one AVX-512 register. Included by simd.h.
#pragma once

namespace PL_NAMESPACE {

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
// the sums of four
PL_INLINE void hsum_four(const vf* a, float* out) {
  __m256 half[4];
  PL_UNROLL
  for (int i = 0; i < 4; ++i) half[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i]), _mm512_extractf32x8_ps(a[i], 1));
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
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
// 32 values as adapter.h keeps them: number i of the first 16 is the low half of word i, of the others the high half.
PL_INLINE vf load_bf16_low(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
PL_INLINE vf load_bf16_high(const void* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))));
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
PL_INLINE void storei(void* p, vi x) { _mm512_storeu_si512(p, x); }
PL_INLINE vi ori(vi a, vi b) { return _mm512_or_si512(a, b); }
// these bits of every byte
PL_INLINE vi bits(vi a, int of_byte) { return _mm512_and_si512(a, _mm512_set1_epi8(char(of_byte))); }
template <int N>
PL_INLINE vi up(vi a) { return _mm512_slli_epi32(a, N); }
template <int N>
PL_INLINE vi down(vi a) { return _mm512_srli_epi32(a, N); }
// 16 unsigned bytes
PL_INLINE vi load_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
PL_INLINE vi load_u16(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
PL_INLINE vi upper_16(vi a) { return _mm512_srai_epi32(a, 16); }
PL_INLINE vi twice_lower_16(vi a) {
  const __m128i places = _mm_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0);
  return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(places));
}
PL_INLINE vi xori(vi a, vi b) { return _mm512_xor_si512(a, b); }
// of a lane's two halves, signed, the sum of products
PL_INLINE vi multiply_pairs(vi a, vi b) { return _mm512_madd_epi16(a, b); }
PL_INLINE vi low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
PL_INLINE vi high_nibbles(vi a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
#if PL_BYTE_DOTS
// acc + sum of four products of unsigned bytes (u, below 16 or any) and signed bytes (s) per lane
// The intrinsic makes gcc 12 spill every accumulator of a large tile: it converts the vector's
// element type back and forth, and the array no longer dissolves into registers.
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "vm"(s));
  return acc;
}
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) { return dot_bytes(acc, u, s); }
// sums of dot_nibbles in 32 bits
PL_INLINE vi widen(vi sums) { return sums; }
#else
alignas(64) static constexpr int16_t kOnes[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// As in dot_avx2.h: acc + u * s + v * z, where four products that share 16 bits fit them
PL_INLINE vi dot_fours(vi acc, vi u, vi s, vi v, vi z) {
  vi t, more;
  __asm__(
      "vpmaddubsw %4, %3, %1\n\tvpmaddubsw %6, %5, %2\n\tvpaddw %2, %1, %1\n\t"
      "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
      : "+v"(acc), "=&v"(t), "=v"(more)
      : "v"(u), "v"(s), "v"(v), "v"(z), "m"(kOnes));
  return acc;
}
// acc + u * s, where two products that share 16 bits fit them
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  vi t;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
          : "+v"(acc), "=&v"(t)
          : "v"(u), "v"(s), "m"(kOnes));
  return acc;
}
// in 16 bits, which hold 16 products of a nibble
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) {
  vi t;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(acc), "=&v"(t) : "v"(u), "v"(s));
  return acc;
}
PL_INLINE vi widen(vi pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }

PL_INLINE vf sums_of_two(vf a) { return add(a, _mm512_permute_ps(a, 0xb1)); }
// of the lanes i, i + 1, i + 4 and i + 5 of each eight, for i = 0 and 2, several times each
PL_INLINE vf sums_of_four(vf a) {
  const vf pairs = sums_of_two(a);
  return add(pairs, _mm512_shuffle_f32x4(pairs, pairs, 0xb1));
}
// see simd_avx2.h
template <int Together>
PL_INLINE float largest_sum(const vf* v, int n) {
  static_assert(Together == 2 || Together == 4);
  vf high = zero(), low = zero();
  for (int i = 0; i < n; ++i) {
    const vf up = vmax(v[i], zero()), down = vmin(v[i], zero());
    high = vmax(Together == 4 ? sums_of_four(up) : sums_of_two(up), high);
    low = vmin(Together == 4 ? sums_of_four(down) : sums_of_two(down), low);
  }
  return hmax(vmax(high, sub(zero(), low)));
}
#endif

}  // namespace PL_NAMESPACE
