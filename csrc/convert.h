// Single numbers between float32, its bits and the 16-bit formats.
//
// Internal to every translation unit, and without the standard library: the kernels' units are compiled for
// newer machines than the others, and must not share a function with them.
#pragma once
#include <cstdint>
#include <cstring>

#define PL_INLINE static inline __attribute__((always_inline))

namespace paceline {

PL_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

PL_INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// to nearest even; a NaN stays one
PL_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PL_INLINE float bf16_to_float(uint16_t x) { return from_bits(uint32_t(x) << 16); }

PL_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, rest = h & 1023u;
  if (exponent == 0) {
    const float v = float(rest) * 5.9604644775390625e-8f;
    return sign ? -v : v;
  }
  return from_bits(sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (rest << 13));
}

// to nearest even; what is too large, or a NaN, becomes infinite
PL_INLINE uint16_t float_to_half(float x) {
  const uint32_t sign = (to_bits(x) >> 16) & 0x8000u, bits = to_bits(x) & 0x7fffffffu;
  if (bits >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  // below the smallest normal: count steps of 2^-24
  if (bits < 0x38800000u) return uint16_t(sign | uint32_t(__builtin_nearbyintf(from_bits(bits) * 16777216.0f)));
  const uint32_t odd = (bits >> 13) & 1u;
  return uint16_t(sign | ((bits - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace paceline
