// Activations in the form that packed weights multiply.
// Included by kernels.cpp, once per instruction set.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace PL_NAMESPACE {
using namespace paceline;

PL_INLINE float largest(const float* x, int64_t n) {
  vf high = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) high = vmax(vabs(load(x + i)), high);
  if (i < n) high = vmax(vabs(load_n(x + i, int(n - i))), high);
  return hmax(high);
}

// Steps of a byte in what is `top` at most. None where they were no number in float32: such values are
// nothing beside any others, and infinitely many steps of a zero are not zero.
PL_INLINE float steps_in(float top) { return top > 1e-36f ? 127.0f / top : 0.0f; }

// round(x * factor) + offset as bytes
PL_INLINE void to_bytes(const float* x, int64_t n, float factor, int offset, uint8_t* y) {
  const vf f = set1(factor);
  const vi shift = set1i(offset);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_bytes(y + i, addi(to_int(mul(load(x + i), f)), shift));
  if (i < n) {
    uint8_t rest[16];
    store_bytes(rest, addi(to_int(mul(load_n(x + i, int(n - i)), f)), shift));
    memcpy(y + i, rest, size_t(n - i));
  }
}

// The value of which a byte has 127 steps: the largest, or more where the sums of a lane ask for it. Without an
// instruction for products of bytes a lane of 16 bits takes several of them (dot_avx2.h): two columns, or with
// Together = 4 those of two units that follow each other, of bytes from 1 to 255 times these. That fits if no
// such activations of one sign sum up to more than 128. Rounding adds half a step to each, so less than 127
// for four and less than 128 for two before it is enough. Half of all neighbours have opposite signs, and the
// rotation spreads large values, so steps grow little.
template <int Together>
PL_INLINE float reach(const vf* v, int n) {
  vf high = zero();
  for (int i = 0; i < n; ++i) high = vmax(vabs(v[i]), high);
  const float top = hmax(high);
#if PL_BYTE_DOTS
  return top;
#else
  const float sum = largest_sum<Together>(v, n) * (Together == 4 ? 127.0f / 126.99f : 127.0f / 127.99f);
  return sum > top ? sum : top;
#endif
}

// 64 values times the Hadamard matrix of order 64 (Sylvester's), which over 8 is its own inverse
PL_INLINE void rotate_group(const float* x, vf* v) {
  static_assert(kActGroup == 64);
  PL_UNROLL
  for (int i = 0; i < 4; ++i)
    v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + 16 * i)))));
  const vf a = add(v[0], v[1]), b = sub(v[0], v[1]), c = add(v[2], v[3]), d = sub(v[2], v[3]);
  v[0] = add(a, c), v[1] = add(b, d), v[2] = sub(a, c), v[3] = sub(b, d);
}

// See Kernels.
static float rotate(float* x, int64_t n) {
  vf high = zero();
  int64_t i = 0;
  for (; i + kActGroup <= n; i += kActGroup) {
    vf v[4];
    rotate_group(x + i, v);
    PL_UNROLL
    for (int j = 0; j < 4; ++j) {
      v[j] = mul(v[j], set1(0.125f));
      high = vmax(vabs(v[j]), high);
      store(x + i + 16 * j, v[j]);
    }
  }
  const float top = hmax(high), rest = largest(x + i, n - i);
  return rest > top ? rest : top;
}

static void quantize_u8(const float* x, int64_t n, float factor, uint8_t* y) { to_bytes(x, n, factor, 128, y); }

// 64 rotated values as bytes; receives the scale of the bytes and their sum
PL_INLINE void encode_group(const float* x, uint8_t* y, float* scale, float* sum) {
  vf v[4];
  rotate_group(x, v);
  const float top = reach<4>(v, 4);
  const vf f = set1(steps_in(top));
  vf total = zero();
  PL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const vf q = round_even(mul(v[i], f));
    total = add(total, q);
    store_bytes(y + 16 * i, to_int(q));
  }
  // the division by 8
  *scale = top * (1.0f / (127 * 8));
  *sum = hsum(total);
}

// fewer than 64 values, as they are
static void encode_rest(const float* x, int n, uint8_t* y, float* scale, float* sum) {
  vf v[4];
  const int parts = (n + 15) / 16;
  for (int i = 0; i < parts; ++i) v[i] = n - 16 * i < 16 ? load_n(x + 16 * i, n - 16 * i) : load(x + 16 * i);
  const float top = reach<4>(v, parts);
  const vf f = set1(steps_in(top));
  vf total = zero();
  for (int i = 0; i < parts; ++i) {
    const vf q = round_even(mul(v[i], f));
    total = add(total, q);
    uint8_t bytes[16];
    store_bytes(bytes, to_int(q));
    memcpy(y + 16 * i, bytes, size_t(n - 16 * i < 16 ? n - 16 * i : 16));
  }
  *scale = top / 127.0f;
  *sum = hsum(total);
}

// Activations beside 4-bit weights: `count` of a row's `groups` from `first` on, at most 16. What is one number a group is
// computed for all of them at once.
static void encode_groups(const float* x, int64_t first, int64_t count, int64_t groups, uint8_t* y, float* scale) {
  x += first * kGroup;
  y += first * kGroup;
  alignas(64) float tops[16] = {}, sums[16] = {}, halves[32] = {};
  for (int64_t g = 0; g < count; ++g) {
    const vf a = load(x + g * kGroup), b = load(x + g * kGroup + 16);
    tops[g] = hmax(vmax(vabs(a), vabs(b)));
  }
  const vf top = load(tops);
  alignas(64) float factors[16];
  // as steps_in
  store(factors, where_at_least(top, set1(1e-36f), div(set1(127.0f), top)));
#if !PL_BYTE_DOTS
  alignas(64) static constexpr float kSides[16] = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
  alignas(64) float apart[16] = {};
#endif
  for (int64_t g = 0; g < count; ++g) {
    const vf f = set1(factors[g]);
    const vf a = round_even(mul(load(x + g * kGroup), f)), b = round_even(mul(load(x + g * kGroup + 16), f));
    store_bytes(y + g * kGroup, to_int(a));
    store_bytes(y + g * kGroup + 16, to_int(b));
    halves[2 * g] = hsum(a);
    halves[2 * g + 1] = hsum(b);
    sums[g] = halves[2 * g] + halves[2 * g + 1];
#if !PL_BYTE_DOTS
    apart[g] = hsum(mul(add(a, b), load(kSides)));
#endif
  }
  // The largest passes over what is not a number, and bytes do not hold it, but sums do. Kinds without a minimum
  // read no sum, so the scale says it too, as it does of infinity, which has no steps
  const vf sum = load(sums), step = add(div(top, set1(127.0f)), sub(sum, sum));
  store_n(scale + first, step, int(count));
  store_n(scale + groups + first, mul(step, sum), int(count));
  // zero in place of what is not a number, from here on
  const vf least = set1(-1e9f), whole = where_at_least(sum, least, sum);
  alignas(64) int32_t numbers[32];
  for (int i = 0; i < 2; ++i) {
    const vf half = load(halves + 16 * i);
    storei(numbers + 16 * i, to_int(mul(where_at_least(half, least, half), set1(-32.0f))));
  }
  memcpy(scale + 2 * (groups + first), numbers, size_t(count) * 8);
  // What sums of nibbles times activations begin with, so that they come out as those of nibbles - 8. With byte dots
  // they are 16 bits, of which 2^15 is taken away at the end, below the sum of the activations; without, two times 16
  // bits, of columns 0 and 1 of each four and of the others
#if PL_BYTE_DOTS
  storei(numbers, addi(addi(up<16>(to_int(whole)), set1i(32768)), to_int(mul(whole, set1(-8.0f)))));
#else
  const vf sides = load(apart), other = where_at_least(sides, least, sides), factor = set1(-4.0f);
  const vi lower = up<16>(to_int(mul(add(whole, other), factor)));
  storei(numbers, ori(down<16>(lower), up<16>(to_int(mul(sub(whole, other), factor)))));
#endif
  memcpy(scale + 4 * groups + first, numbers, size_t(count) * 4);
}

static void encode(const float* x, int64_t n, int64_t padded, Acts kind, void* y, float* scale) {
  if (kind == Acts::kF32) {
    memcpy(y, x, size_t(n) * 4);
    memset(static_cast<float*>(y) + n, 0, size_t(padded - n) * 4);
  } else if (kind == Acts::kBF16) {
    uint16_t* out = static_cast<uint16_t*>(y);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
    for (; i < n; ++i) out[i] = float_to_bf16(x[i]);
    memset(out + n, 0, size_t(padded - n) * 2);
  } else if (kind == Acts::kI8) {
    uint8_t* out = static_cast<uint8_t*>(y);
    const int64_t groups = (n + kActGroup - 1) / kActGroup;
    float total = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * kActGroup, count = n - begin < kActGroup ? n - begin : kActGroup;
      float step, sum;
      if (count == kActGroup)
        encode_group(x + begin, out + begin, &step, &sum);
      else
        encode_rest(x + begin, int(count), out + begin, &step, &sum);
      scale[g] = step;
      total += step * sum;
    }
    scale[groups] = 128.0f * total;
    memset(out + n, 0, size_t(padded - n));
  } else {
    const int64_t groups = n / kGroup;
    for (int64_t g = 0; g < groups; g += 16)
      encode_groups(x, g, groups - g < 16 ? groups - g : 16, groups, static_cast<uint8_t*>(y), scale);
  }
}

}  // namespace PL_NAMESPACE
