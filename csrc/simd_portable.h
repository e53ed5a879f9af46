// Sixteen lanes in plain C++, for whatever the compiler makes of them. Included by simd.h.
#pragma once

namespace PL_NAMESPACE {

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
PL_INLINE float hsum(vf a);
// the sums of four
PL_INLINE void hsum_four(const vf* a, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = hsum(a[i]);
}
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
  vf r;
  // S neighbours at a time, which the compiler turns into vectors
  for (int begin = 0; begin < 16; begin += 2 * S)
    for (int i = begin; i < begin + S; ++i) {
      r.x[i] = a.x[i] + a.x[i + S];
      r.x[i + S] = a.x[i] - a.x[i + S];
    }
  return r;
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
PL_INLINE uint16_t u16_at(const void* p, int i) {
  uint16_t x;
  memcpy(&x, static_cast<const uint8_t*>(p) + 2 * i, 2);
  return x;
}
PL_INLINE vf load_half(const void* p) { PL_LANES(vf, half_to_float(u16_at(p, i))); }
PL_INLINE vf load_bf16(const void* p) { PL_LANES(vf, bf16_to_float(u16_at(p, i))); }
PL_INLINE vf load_bf16_low(const void* p) { PL_LANES(vf, bf16_to_float(u16_at(p, 2 * i))); }
PL_INLINE vf load_bf16_high(const void* p) { PL_LANES(vf, bf16_to_float(u16_at(p, 2 * i + 1))); }
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
PL_INLINE void storei(void* p, vi a) { memcpy(p, a.x, 64); }
PL_INLINE vi ori(vi a, vi b) { PL_LANES(vi, a.x[i] | b.x[i]); }
// these bits of every byte
PL_INLINE vi bits(vi a, int of_byte) { PL_LANES(vi, a.x[i] & int32_t(uint32_t(of_byte) * 0x01010101u)); }
template <int N>
PL_INLINE vi up(vi a) { PL_LANES(vi, int32_t(uint32_t(a.x[i]) << N)); }
template <int N>
PL_INLINE vi down(vi a) { PL_LANES(vi, int32_t(uint32_t(a.x[i]) >> N)); }
// 16 unsigned bytes
PL_INLINE vi load_u8(const void* p) { PL_LANES(vi, static_cast<const uint8_t*>(p)[i]); }
PL_INLINE vi load_u16(const void* p) { PL_LANES(vi, u16_at(p, i)); }
PL_INLINE vi xori(vi a, vi b) { PL_LANES(vi, a.x[i] ^ b.x[i]); }
// of a lane's two halves, signed, the sum of products
PL_INLINE vi multiply_pairs(vi a, vi b) {
  PL_LANES(vi, int16_t(a.x[i]) * int16_t(b.x[i]) + (a.x[i] >> 16) * (b.x[i] >> 16));
}
PL_INLINE vi low_nibbles(vi a) { PL_LANES(vi, a.x[i] & 0x0f0f0f0f); }
PL_INLINE vi high_nibbles(vi a) { PL_LANES(vi, int32_t((uint32_t(a.x[i]) >> 4) & 0x0f0f0f0fu)); }
PL_INLINE vi dot_bytes(vi acc, vi u, vi s) {
  for (int i = 0; i < 16; ++i)
    for (int b = 0; b < 32; b += 8)
      acc.x[i] += int32_t((uint32_t(u.x[i]) >> b) & 255u) * int8_t((uint32_t(s.x[i]) >> b) & 255u);
  return acc;
}
PL_INLINE vi dot_nibbles(vi acc, vi u, vi s) { return dot_bytes(acc, u, s); }
PL_INLINE vi widen(vi sums) { return sums; }

}  // namespace PL_NAMESPACE
