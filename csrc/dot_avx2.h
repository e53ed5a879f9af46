// Products of bytes and of pairs of bfloat16 in one register of 256 bits.
#pragma once
#include "simd.h"

namespace PL_NAMESPACE {

PL_INLINE __m256i load_8(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PL_INLINE __m256i broadcast_4(const void* p) { return _mm256_set1_epi32(int32_t(load_u32(p))); }
PL_INLINE __m256 half_8(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }

#if PL_BYTE_DOTS
// sum += w * x in 32 bits, four columns a lane: bytes of w are unsigned, those of x signed. In assembly, since the
// intrinsic lets gcc start several products early, and without {vex} the assembler would take AVX-512's.
PL_INLINE void add_dots(__m256i& sum, __m256i w, __m256i x) {
#ifdef PL_STAND_IN
  alignas(32) uint8_t u[32];
  alignas(32) int8_t s[32];
  alignas(32) int32_t t[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(u), w);
  _mm256_store_si256(reinterpret_cast<__m256i*>(s), x);
  _mm256_store_si256(reinterpret_cast<__m256i*>(t), sum);
  for (int i = 0; i < 32; ++i) t[i / 4] += int32_t(u[i]) * s[i];
  sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(t));
#else
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#endif
}
PL_INLINE void add_twos(__m256i& sum, __m256i w, __m256i x) { add_dots(sum, w, x); }
PL_INLINE void add_fours(__m256i& sum, __m256i w, __m256i x, __m256i v, __m256i y) {
  add_dots(sum, w, x);
  add_dots(sum, v, y);
}
// sums of nibbles are in 32 bits already
PL_INLINE __m256i widen(__m256i sums) { return sums; }
#else
alignas(32) static constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// sum += w * x in 16 bits, two columns a lane: bytes of w are unsigned, those of x signed
PL_INLINE void add_pairs(__m256i& sum, __m256i w, __m256i x) {
  __m256i t;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=x"(t) : "x"(w), "x"(x));
}

// sum += w * x + v * y in 32 bits, where w * x + v * y fits 16 bits
PL_INLINE void add_fours(__m256i& sum, __m256i w, __m256i x, __m256i v, __m256i y) {
  __m256i t, u;
  __asm__(
      "vpmaddubsw %4, %3, %1\n\tvpmaddubsw %6, %5, %2\n\tvpaddw %2, %1, %1\n\t"
      "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(t), "=x"(u)
      : "x"(w), "x"(x), "x"(v), "x"(y), "m"(kOnes));
}

PL_INLINE __m256i widen(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// sum += w * x in 32 bits, where the two products of each 16 bits fit them
PL_INLINE void add_twos(__m256i& sum, __m256i w, __m256i x) {
  __m256i t;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
          : "+x"(sum), "=&x"(t)
          : "x"(w), "x"(x), "m"(kOnes));
}
#endif

// the first (c = 0) or second of pairs of bfloat16
PL_INLINE __m256 pair_column(__m256i pairs, int c) {
  if (c == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000u))));
}

}  // namespace PL_NAMESPACE
