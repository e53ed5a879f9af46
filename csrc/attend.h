// Attention over the paged cache: up to twelve query rows of one KV head against its tiles.
#pragma once
#if PL_LEVEL == 1
#include "attend_avx2.h"
#else
#include "attend_products.h"
#endif

namespace PL_NAMESPACE {

// Soft-capped scores in place, times the queries' scales where there are any. Nothing is masked yet, so what will be
// stays so. Out of line: few models come here, and the others' loops are as they were.
static __attribute__((noinline)) void cap_scores(const AttendArgs& a, int tiles, const float* scale,
                                                 float (*s)[kChunkKeys]) {
  const vf cap = set1(a.softcap), factor = set1(kSoftCapFactor / a.softcap);
  for (int r = 0; r < a.rows; ++r) {
    const vf times = set1(scale ? scale[r] : 1.0f);
    for (int t = 0; t < tiles; ++t) store(s[r] + t * kTile, soft_cap(mul(load(s[r] + t * kTile), times), cap, factor));
  }
}

// The largest visible score of a row in the chunk; invisible ones are overwritten.
PL_INLINE float largest_score(const AttendArgs& a, const Chunk& c, int r, float* s) {
  const int first = a.first[r] - c.first_key, limit = a.limit[r] - c.first_key;
  vf high = set1(kMasked);
  for (int t = 0; t < c.tiles; ++t) {
    vf x = load(s + t * kTile);
    if (t * kTile < first || (t + 1) * kTile > limit) {
      x = keep(x, first - t * kTile, limit - t * kTile, kMasked);
      store(s + t * kTile, x);
    }
    high = vmax(x, high);
  }
  return hmax(high);
}

// Softmax of one row's scores over the chunk, keeping the running maximum and sum: scores become
// probabilities relative to the new maximum, in the form that `weigh` takes, and what was accumulated is
// rescaled. `here`: the chunk's largest score.
template <class D>
PL_INLINE void soften(const AttendArgs& a, const Chunk& c, int r, float* s, float here, float* top, float* sum) {
  const int first = a.first[r] - c.first_key, limit = a.limit[r] - c.first_key;
  const float now = here > *top ? here : *top;
  vf total = zero();
  const vf shift = set1(now);
  for (int t = 0; t < c.tiles; ++t) {
    vf x = load(s + t * kTile);
    x = D::per_unit == 2 ? exp2_down(sub(x, shift)) : exp2v(sub(x, shift));
    if (t * kTile < first || (t + 1) * kTile > limit)
      x = keep(x, first - t * kTile, limit - t * kTile, 0.0f);
    total = add(total, x);
    // in place: a row's bf16 half fills the front of its own floats
    if constexpr (D::per_unit == 2 && kBF16Pairs)
      store_bf16(reinterpret_cast<uint16_t*>(s) + t * kTile, x);
    else
      store(s + t * kTile, x);
  }
  if (now != *top) {
    // before a row's first keys there are zeros
    if (*top != kMasked) {
      float f[16];
      store(f, exp2v(set1(*top - now)));
      *sum *= f[0];
      for (int d = 0; d < a.head_dim; d += 16)
        store(a.out[r] + d, mul(load(a.out[r] + d), set1(f[0])));
    }
    *top = now;
  }
  *sum += hsum(total);
}

// The first `used` tokens of a tile of values, zeros behind: slots never written may hold anything,
// NaN included, and 0 * NaN is not 0.
template <class D>
static void copy_used_values(const uint8_t* tile, int used, int head_dim, uint8_t* out) {
  constexpr int g = D::per_unit, bytes = 4 / g;
  const int64_t group = int64_t(head_dim) * 4;
  const int groups = (used + g - 1) / g;
  memcpy(out, tile, size_t(groups * group));
  memset(out + groups * group, 0, size_t((kTile / g - groups) * group));
  for (int token = used; token < groups * g; ++token) {
    uint8_t* p = out + (token / g) * group + (token % g) * bytes;
    for (int d = 0; d < head_dim; ++d) memset(p + d * 4, 0, bytes);
  }
}

template <class D, int R>
static void attend_rows(const AttendArgs& a) {
  alignas(64) float s[R][kChunkKeys];
  alignas(64) uint8_t last_v[kMaxHeadDim * kTile * 4];
  float top[R], sum[R], here[R];
  for (int r = 0; r < R; ++r) {
    top[r] = kMasked;
    sum[r] = 0;
    for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, zero());
  }
  const int64_t half = int64_t(a.head_dim) * kTile * (4 / D::per_unit);
  Chunk c;
  for (int key = a.key_begin; key < a.key_end; key += c.tiles * kTile) {
    find_tiles(a, key, 2 * half, c);
    for (int t = 0; t < c.tiles; ++t) {
      c.v[t] = c.k[t] + half;
      const int used = a.key_end - (key + t * kTile);
      if (used < kTile) {
        copy_used_values<D>(c.v[t], used, a.head_dim, last_v);
        c.v[t] = last_v;
      }
    }
    scores<D, R>(a, c, s);
    if (a.softcap > 0) cap_scores(a, c.tiles, nullptr, s);
    // one loop after the other: a row waits for its largest score, and others can go on
    for (int r = 0; r < R; ++r) here[r] = largest_score(a, c, r, s[r]);
    for (int r = 0; r < R; ++r) soften<D>(a, c, r, s[r], here[r], &top[r], &sum[r]);
    weigh_values<D, R>(a, c, s);
  }
  for (int r = 0; r < R; ++r) {
    if (a.split) {
      a.out[r][a.head_dim] = top[r];
      a.out[r][a.head_dim + 1] = sum[r];
    } else {
      const vf f = set1(sum[r] > 0 ? 1.0f / sum[r] : 0.0f);
      for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, mul(load(a.out[r] + d), f));
    }
  }
}

template <class D, int R>
static void attend_dispatch(const AttendArgs& a) {
  if constexpr (R > 1) {
    if (a.rows < R) return attend_dispatch<D, R - 1>(a);
  }
  attend_rows<D, R>(a);
}

template <class D>
static void attend(const AttendArgs& a) {
  attend_dispatch<D, kRows>(a);
}

// into, part: [head_dim outputs, maximum, sum] of the keys of some rows, up to 16; `into` becomes that of both
// together. A part of which a row sees nothing has zeros and a maximum far below all scores, and changes nothing.
static void merge_part(const float* part, int rows, int64_t stride, int head_dim, float* into) {
  static_assert(kMaxRows <= 16);
  // factors of all rows at once
  float before[16] = {}, now[16] = {}, top[16];
  for (int r = 0; r < rows; ++r) {
    before[r] = into[r * stride + head_dim];
    now[r] = part[r * stride + head_dim];
  }
  const vf most = vmax(load(before), load(now));
  store(top, most);
  store(before, exp2v(sub(load(before), most)));
  store(now, exp2v(sub(load(now), most)));
  for (int r = 0; r < rows; ++r, part += stride, into += stride) {
    const vf f = set1(before[r]), g = set1(now[r]);
    for (int d = 0; d < head_dim; d += 16) store(into + d, fma(load(into + d), f, mul(load(part + d), g)));
    into[head_dim] = top[r];
    into[head_dim + 1] = into[head_dim + 1] * before[r] + part[head_dim + 1] * now[r];
  }
}

static void finish_parts(const float* from, int head_dim, float* out) {
  const float sum = from[head_dim + 1];
  const vf f = set1(sum > 0 ? 1.0f / sum : 0.0f);
  for (int d = 0; d < head_dim; d += 16) store(out + d, mul(load(from + d), f));
}

}  // namespace PL_NAMESPACE
