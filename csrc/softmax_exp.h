// Passes over the vocabulary: the soft cap; for sampling weights, largest logits, sums above a threshold.
// Included by kernels.cpp, once per instruction set; see kernels.h for what each promises.
#pragma once
#include "simd.h"

namespace PL_NAMESPACE {

constexpr float kNothing = -__builtin_inff();

// lanes past the end are minus infinity
PL_INLINE vf load_or_nothing(const float* x, int64_t left) {
  return left >= 16 ? load(x) : keep(load_n(x, int(left)), 0, int(left), kNothing);
}

struct Weigher {
  vf best, high, low, least;
  PL_INLINE_MEMBER Weigher(const Exponent& e, float least_weight)
      : best(set1(e.best)), high(set1(e.high)), low(set1(e.low)), least(set1(least_weight)) {}
  PL_INLINE_MEMBER vf operator()(vf x) const {
    const vf d = sub(x, best), y = mul(d, high), floor = set1(-126.0f);
    const vf n = round_even(vmax(y, floor));
    // of the product before it was rounded: far from the best, an error of the last bit of y is one of
    // many bits of the weight
    const vf f = fma(d, low, fma(d, high, sub(zero(), n)));
    const vf w = where_at_least(y, floor, exp2_parts(n, f));
    return where_at_least(w, least, w);
  }
};

static void cap_logits(float* x, int64_t n, float cap) {
  const vf most = set1(cap), factor = set1(kSoftCapFactor / cap);
  // plus zero, but for infinities: they are faults, which the cap would hide
  auto capped = [&](vf v) PL_INLINE_LAMBDA { return fma(v, zero(), soft_cap(v, most, factor)); };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, capped(load(x + i)));
  if (i < n) store_n(x + i, capped(load_n(x + i, int(n - i))), int(n - i));
}

static int32_t first_largest(const float* x, int64_t n) {
  vf a = set1(kNothing), b = a;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = vmax(load(x + i), a);
    b = vmax(load(x + i + 16), b);
  }
  for (; i < n; i += 16) a = vmax(load_or_nothing(x + i, n - i), a);
  const float top = hmax(vmax(a, b));
  if (top == kNothing) return -1;
  const vf wanted = set1(top);
  for (i = 0; i < n; i += 16) {
    const uint32_t found = at_least(load_or_nothing(x + i, n - i), wanted);
    if (found) return int32_t(i + __builtin_ctz(found));
  }
  return -1;
}

static void masked(const float* x, const uint8_t* mask, int64_t n, float* out) {
  const vf half = set1(0.5f), endless = set1(__builtin_inff());
  int64_t i = 0;
  // what a logit is at most: infinity or minus infinity
  for (; i + 16 <= n; i += 16) store(out + i, vmin(load(x + i), mul(sub(half, load_s8(mask + i)), endless)));
  for (; i < n; ++i) out[i] = mask[i] ? kNothing : x[i];
}

template <bool Store>
PL_INLINE void weigh_chunk(const float* x, int64_t n, const Weigher& weight, float* w, float* sum) {
  vf s[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    PL_UNROLL
    for (int j = 0; j < 4; ++j) {
      const vf v = weight(load(x + i + 16 * j));
      s[j] = add(s[j], v);
      if (Store) store(w + i + 16 * j, v);
    }
  }
  for (; i < n; i += 16) {
    const vf v = weight(load_or_nothing(x + i, n - i));
    s[0] = add(s[0], v);
    if (Store) store(w + i, v);
  }
  *sum = hsum(add(add(s[0], s[1]), add(s[2], s[3])));
}

static void weigh(const float* x, int64_t n, const Exponent& e, float least, float* w, float* sums) {
  const Weigher weight(e, least);
  for (int64_t i = 0; i < n; i += kWeighChunk) {
    const int64_t count = n - i < kWeighChunk ? n - i : kWeighChunk;
    float sum;
    if (w)
      weigh_chunk<true>(x + i, count, weight, w + i, &sum);
    else
      weigh_chunk<false>(x + i, count, weight, nullptr, &sum);
    if (sums) sums[i / kWeighChunk] = sum;
  }
}

static void tops(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kWeighChunk, out += 16) {
    const int64_t end = i + kWeighChunk < n ? i + kWeighChunk : n;
    vf a = set1(kNothing), b = a;
    int64_t j = i;
    for (; j + 32 <= end; j += 32) {
      a = vmax(load(x + j), a);
      b = vmax(load(x + j + 16), b);
    }
    for (; j < end; j += 16) a = vmax(load_or_nothing(x + j, end - j), a);
    store(out, vmax(a, b));
  }
}

static void sum_at_least(const float* x, int64_t n, float t, double* sum, int64_t* count) {
  const vf threshold = set1(t);
  double total = 0;
  int64_t numbers[2] = {0, 0};
  // float32 lanes take few enough numbers each that little is lost
  for (int64_t i = 0; i < n; i += kWeighChunk) {
    const int64_t end = i + kWeighChunk < n ? i + kWeighChunk : n;
    vf s[4] = {zero(), zero(), zero(), zero()};
    int64_t j = i;
    for (; j + 64 <= end; j += 64) {
      PL_UNROLL
      for (int k = 0; k < 4; ++k) s[k] = add_at_least(s[k], load(x + j + 16 * k), threshold, &numbers[k % 2]);
    }
    for (; j < end; j += 16) s[0] = add_at_least(s[0], load_or_nothing(x + j, end - j), threshold, &numbers[0]);
    total += double(hsum(add(add(s[0], s[1]), add(s[2], s[3]))));
  }
  *sum = total;
  *count = numbers[0] + numbers[1];
}

static int64_t collect(const float* x, int64_t n, float low, float high, int64_t limit, int32_t* places) {
  const vf from = set1(low), to = set1(high);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const vf v = load_or_nothing(x + i, n - i);
    uint32_t bits = at_least(v, from) & ~at_least(v, to);
    for (; bits; bits &= bits - 1) {
      if (found == limit) return limit + 1;
      places[found++] = int32_t(i + __builtin_ctz(bits));
    }
  }
  return found;
}

}  // namespace PL_NAMESPACE
