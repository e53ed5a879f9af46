// Attention over an int8 cache. Keys and values are bytes offset by 128 with a scale a token; queries
// are signed bytes with a scale a row. Probabilities times value scales become 14-bit integers,
// split in two 7-bit halves, so that the second product is exact to 1e-4 and still runs on bytes.
#pragma once
#include "attend.h"

namespace PL_NAMESPACE {

struct ChunkI8 {
  Chunk tiles;
  const float* k_scale[kChunkTiles];
  const float* v_scale[kChunkTiles];
};

// scores of T tiles from tile t on
template <int R, int T>
static void scores_i8_tiles(const AttendArgs& a, const ChunkI8& c, int t, const float* offset, float (*s)[kChunkKeys],
                            Ahead& ahead) {
  const int units = a.head_dim / 4;
  vi acc[T][R];
  PL_UNROLL
  for (int i = 0; i < T; ++i)
    PL_UNROLL
    for (int r = 0; r < R; ++r) acc[i][r] = zeroi();
  for (int u = 0; u < units; ++u) {
    if constexpr (R <= 6) ahead.step();
    vi k[T];
    PL_UNROLL
    for (int i = 0; i < T; ++i) {
      k[i] = loadi(c.tiles.k[t + i] + u * 64);
    }
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      const vi x = set1i(int32_t(load_u32(a.q + r * a.q_stride + 4 * u)));
      PL_UNROLL
      for (int i = 0; i < T; ++i) acc[i][r] = dot_bytes(acc[i][r], k[i], x);
    }
  }
  PL_UNROLL
  for (int i = 0; i < T; ++i) {
    const vf scale = load(c.k_scale[t + i]);
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      store(s[r] + (t + i) * kTile,
            mul(mul(sub(to_float(acc[i][r]), set1(offset[r])), scale), set1(a.q_scale[r])));
  }
}

template <int R>
static void scores_i8(const AttendArgs& a, const ChunkI8& c, const float* offset, float (*s)[kChunkKeys]) {
  int t = 0;
  Ahead ahead(c.tiles, int64_t(a.head_dim) * kTile * 2 + 2 * kTile * 4, (c.tiles.tiles + 1) / 2 * (a.head_dim / 4));
  for (; t + 2 <= c.tiles.tiles; t += 2) scores_i8_tiles<R, 2>(a, c, t, offset, s, ahead);
  for (; t < c.tiles.tiles; ++t) scores_i8_tiles<R, 1>(a, c, t, offset, s, ahead);
}

// Probabilities in s, times value scales, to 14-bit integers in two byte planes of 128 keys each.
// Returns the scale of the integers; `offset` receives 128 * their sum.
PL_INLINE float split_probabilities(const ChunkI8& c, float* s, int limit, uint8_t* planes, float* offset) {
  vf high = zero();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    // scales of slots never written may be NaN
    const vf scale = keep(load(c.v_scale[t]), 0, limit - t * kTile, 0.0f);
    const vf x = mul(load(s + t * kTile), scale);
    store(s + t * kTile, x);
    high = vmax(x, high);
  }
  const float top = hmax(high);
  const vf inverse = set1(top > 0 ? 16255.0f / top : 0.0f);
  vf sum = zero();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    const vf x = round_even(mul(load(s + t * kTile), inverse));
    // 16255 = 127 * 128 - 1: both halves stay below 128
    const vf upper = round_even(sub(mul(x, set1(1.0f / 128)), set1(0.498046875f)));
    store_bytes(planes + t * kTile, to_int(upper));
    store_bytes(planes + kChunkKeys + t * kTile, to_int(sub(x, mul(upper, set1(128.0f)))));
    sum = add(sum, x);
  }
  *offset = 128.0f * hsum(sum);
  return top / 16255.0f;
}

template <int R, int V>
static void weigh_i8(const AttendArgs& a, const ChunkI8& c, const uint8_t (*planes)[2 * kChunkKeys],
                     const float* scale, const float* offset, int dim) {
  vi upper[R][V], lower[R][V];
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) upper[r][v] = lower[r][v] = zeroi();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    for (int u = 0; u < kTile / 4; ++u) {
      const uint8_t* row = c.tiles.v[t] + (int64_t(u) * a.head_dim + dim) * 4;
      vi w[V];
      PL_UNROLL
      for (int v = 0; v < V; ++v) w[v] = loadi(row + v * 64);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const uint8_t* p = planes[r] + t * kTile + u * 4;
        const vi x = set1i(int32_t(load_u32(p))), y = set1i(int32_t(load_u32(p + kChunkKeys)));
        PL_UNROLL
        for (int v = 0; v < V; ++v) {
          upper[r][v] = dot_bytes(upper[r][v], w[v], x);
          lower[r][v] = dot_bytes(lower[r][v], w[v], y);
        }
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) {
      float* out = a.out[r] + dim + v * 16;
      const vf sum = sub(fma(to_float(upper[r][v]), set1(128.0f), to_float(lower[r][v])), set1(offset[r]));
      store(out, fma(sum, set1(scale[r]), load(out)));
    }
}

template <int R>
static void attend_rows_i8(const AttendArgs& a) {
  alignas(64) float s[R][kChunkKeys];
  alignas(64) uint8_t planes[R][2 * kChunkKeys];
  float top[R], sum[R], q_offset[R], p_scale[R], p_offset[R];
  for (int r = 0; r < R; ++r) {
    top[r] = kMasked;
    sum[r] = 0;
    int total = 0;
    for (int d = 0; d < a.head_dim; ++d) total += reinterpret_cast<const int8_t*>(a.q)[r * a.q_stride + d];
    q_offset[r] = 128.0f * float(total);
    for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, zero());
  }
  const int64_t half = int64_t(a.head_dim) * kTile, tile_size = 2 * half + 2 * kTile * 4;
  for (int key = a.key_begin; key < a.key_end; key += kChunkKeys) {
    ChunkI8 c;
    find_tiles(a, key, tile_size, c.tiles);
    for (int t = 0; t < c.tiles.tiles; ++t) {
      c.tiles.v[t] = c.tiles.k[t] + half;
      c.k_scale[t] = reinterpret_cast<const float*>(c.tiles.v[t] + half);
      c.v_scale[t] = c.k_scale[t] + kTile;
      if (R <= 6) prefetch(c.k_scale[t]), prefetch(c.v_scale[t]);
    }
    scores_i8<R>(a, c, q_offset, s);
    for (int r = 0; r < R; ++r) {
      soften(a, c.tiles, r, s[r], &top[r], &sum[r]);
      p_scale[r] = split_probabilities(c, s[r], a.limit[r] - key, planes[r], &p_offset[r]);
    }
    int dim = 0;
    constexpr int V = R <= 3 ? 4 : R <= 6 ? 2 : 1;
    for (; dim + 16 * V <= a.head_dim; dim += 16 * V) weigh_i8<R, V>(a, c, planes, p_scale, p_offset, dim);
    for (; dim < a.head_dim; dim += 16) weigh_i8<R, 1>(a, c, planes, p_scale, p_offset, dim);
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

template <int R>
static void attend_i8_dispatch(const AttendArgs& a) {
  if constexpr (R > 1) {
    if (a.rows < R) return attend_i8_dispatch<R - 1>(a);
  }
  attend_rows_i8<R>(a);
}

static void attend_i8(const AttendArgs& a) { attend_i8_dispatch<kRows>(a); }

}  // namespace PL_NAMESPACE
