// Attention over an int8 cache. Keys are bytes offset by 128, values signed bytes, both with a scale a
// token; queries are signed bytes with a scale a row. Probabilities times the scales of the values
// become unsigned bytes.
#pragma once
#include "attend.h"

namespace PL_NAMESPACE {

// What a byte of a product has 254 steps of: the largest, or, where four of them times values share 16 bits
// (attend_avx2.h), the largest sum of such four: rounding and what is carried add one step to each, and
// 258 times 127 still fits.
PL_INLINE vf most_of(vf x) {
#if PL_BYTE_DOTS
  return x;
#else
  return sums_of_four(x);
#endif
}

// Softmax of one row's scores over the chunk, keeping the running maximum and the sums of 16 lanes.
// `unit`: what scores in s are multiples of. Probabilities relative to `here`, the chunk's own maximum, times the
// scales of the values stay in s. Returns what they count for relative to the running maximum; what was accumulated
// is rescaled. `most` receives the largest product, see most_of.
PL_INLINE float soften_i8(const AttendArgs& a, const ChunkI8& c, int r, float unit, float* s, float here, float* top,
                          float* sums, float* most) {
  const int first = a.first[r] - c.tiles.first_key, limit = a.limit[r] - c.tiles.first_key;
  const vf times = set1(unit), shift = set1(-here);
  vf total = zero(), high = zero();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    vf x = exp2_down(fma(load(s + t * kTile), times, shift));
    if (t * kTile < first || (t + 1) * kTile > limit) x = keep(x, first - t * kTile, limit - t * kTile, 0.0f);
    total = add(total, x);
    x = mul(x, load(c.v_scale + t * kTile));
    store(s + t * kTile, x);
    high = vmax(most_of(x), high);
  }
  *most = hmax(high);
  // before a row's first keys there are zeros
  if (*top == kMasked) {
    store(sums, total);
    *top = here;
    return 1.0f;
  }
  float f[16];
  store(f, exp2v(set1(here > *top ? *top - here : here - *top)));
  if (here > *top) {
    for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, mul(load(a.out[r] + d), set1(f[0])));
    store(sums, fma(load(sums), set1(f[0]), total));
    *top = here;
    return 1.0f;
  }
  store(sums, fma(total, set1(f[0]), load(sums)));
  return f[0];
}

// The products in s as bytes, in steps of a 254th of `most`; what rounding takes from one key is
// given to the one 32 further on, so that many small probabilities are not lost.
PL_INLINE void to_steps(const ChunkI8& c, const float* s, float most, uint8_t* bytes) {
  // with what is carried over at most 254.5, which rounds to a byte
  const vf steps = set1(most > 0 ? 254.0f / most : 0.0f);
  // two chains of what is carried: one would set the pace. Chunks begin at even tiles, so a key is always in
  // the same one
  vf carried[2] = {zero(), zero()};
  auto tile = [&](int t, vf& carry) PL_INLINE_LAMBDA {
    const vf x = fma(load(s + t * kTile), steps, carry);
    const vi q = to_int(x);
    carry = sub(x, to_float(q));
    store_bytes(bytes + t * kTile, q);
  };
  int t = 0;
  for (; t + 2 <= c.tiles.tiles; t += 2) {
    tile(t, carried[0]);
    tile(t + 1, carried[1]);
  }
  if (t < c.tiles.tiles) tile(t, carried[0]);
}

template <int R>
static void attend_rows_i8(const AttendArgs& a) {
  alignas(64) float s[R][kChunkKeys];
  alignas(64) uint8_t bytes[R][kChunkKeys];
  alignas(64) float sums[R][16];
  float top[R], here[R], most[R], share[R], unit[R];
  int32_t start[R];
  for (int r = 0; r < R; ++r) {
    top[r] = kMasked;
    unit[r] = a.softcap > 0 ? 1.0f : a.q_scale[r];
    store(sums[r], zero());
    int total = 0;
    for (int d = 0; d < a.head_dim; ++d) total += reinterpret_cast<const int8_t*>(a.q)[r * a.q_stride + d];
    start[r] = -128 * total;
    for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, zero());
  }
  const int64_t half = int64_t(a.head_dim) * kTile, tile_size = 2 * half + 2 * kTile * 4;
  ChunkI8 c;
  for (int key = a.key_begin; key < a.key_end; key += c.tiles.tiles * kTile) {
    find_tiles(a, key, tile_size, c.tiles);
    for (int t = 0; t < c.tiles.tiles; ++t) {
      c.tiles.v[t] = c.tiles.k[t] + half;
      c.k_scale[t] = reinterpret_cast<const float*>(c.tiles.v[t] + half);
      if (R <= 6) prefetch(c.k_scale[t]), prefetch(c.k_scale[t] + kTile);
    }
    scores_i8<R>(a, c, start, s);
    if (a.softcap > 0) cap_scores(a, c.tiles.tiles, a.q_scale, s);
    for (int t = 0; t < c.tiles.tiles; ++t)
      store(c.v_scale + t * kTile, keep(load(c.k_scale[t] + kTile), 0, a.key_end - key - t * kTile, 0.0f));
    for (int r = 0; r < R; ++r) here[r] = largest_score(a, c.tiles, r, s[r]) * unit[r];
    for (int r = 0; r < R; ++r) share[r] = soften_i8(a, c, r, unit[r], s[r], here[r], &top[r], sums[r], &most[r]);
    for (int r = 0; r < R; ++r) {
      to_steps(c, s[r], most[r], bytes[r]);
      share[r] *= most[r] / 254.0f;
    }
    weigh_i8_values<R>(a, c, bytes, share);
  }
  for (int r = 0; r < R; ++r) {
    const float sum = hsum(load(sums[r]));
    if (a.split) {
      a.out[r][a.head_dim] = top[r];
      a.out[r][a.head_dim + 1] = sum;
    } else {
      const vf f = set1(sum > 0 ? 1.0f / sum : 0.0f);
      for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, mul(load(a.out[r] + d), f));
    }
  }
}

template <int R>
static void attend_i8_dispatch(const AttendArgs& a) {
  if constexpr (R > 1) {
    if (a.rows < R) return attend_i8_dispatch<R - 1>(a);
  }
  attend_rows_i8<R>(a);
}

static void attend_i8(const AttendArgs& a) { attend_i8_dispatch<kRows>(a); }

}  // namespace PL_NAMESPACE
