// Attention over an int8 cache. Keys are bytes offset by 128, values signed bytes, both with a scale a
// token; queries are signed bytes with a scale a row. Probabilities times the scales of the values
// become unsigned bytes.
#pragma once
#include "attend.h"

namespace PL_NAMESPACE {

struct ChunkI8 {
  Chunk tiles;
  const float* k_scale[kChunkTiles];
  // scales of the values; zero for slots never written, whose scales may be NaN
  alignas(64) float v_scale[kChunkKeys];
};

// Scores of T tiles from tile t on, still without the scales of the queries. `start`: -128 times the
// sum of each query, which the keys' offset of 128 adds.
template <int R, int T>
static void scores_i8_tiles(const AttendArgs& a, const ChunkI8& c, int t, const int32_t* start, float (*s)[kChunkKeys],
                            Ahead& ahead) {
  const int units = a.head_dim / 4;
  vi acc[T][R];
  PL_UNROLL
  for (int i = 0; i < T; ++i)
    PL_UNROLL
    for (int r = 0; r < R; ++r) acc[i][r] = set1i(start[r]);
  for (int u = 0; u < units; ++u) {
    if constexpr (R <= 6) ahead.step();
    vi k[T];
    PL_UNROLL
    for (int i = 0; i < T; ++i) k[i] = loadi(c.tiles.k[t + i] + u * 64);
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
    for (int r = 0; r < R; ++r) store(s[r] + (t + i) * kTile, mul(to_float(acc[i][r]), scale));
  }
}

template <int R>
static void scores_i8(const AttendArgs& a, const ChunkI8& c, const int32_t* start, float (*s)[kChunkKeys]) {
  int t = 0;
  Ahead ahead(c.tiles, int64_t(a.head_dim) * kTile * 2 + 2 * kTile * 4, (c.tiles.tiles + 1) / 2 * (a.head_dim / 4));
  for (; t + 2 <= c.tiles.tiles; t += 2) scores_i8_tiles<R, 2>(a, c, t, start, s, ahead);
  for (; t < c.tiles.tiles; ++t) scores_i8_tiles<R, 1>(a, c, t, start, s, ahead);
}

// Softmax of one row's scores over the chunk, keeping the running maximum and the sums of 16 lanes.
// Probabilities relative to `here`, the chunk's own maximum, times the scales of the values stay in s.
// Returns what they count for relative to the running maximum; what was accumulated is rescaled.
// `most` receives the largest product.
PL_INLINE float soften_i8(const AttendArgs& a, const ChunkI8& c, int r, float* s, float here, float* top, float* sums,
                          float* most) {
  const int first = a.first[r] - c.tiles.first_key, limit = a.limit[r] - c.tiles.first_key;
  const vf times = set1(a.q_scale[r]), shift = set1(-here);
  vf total = zero(), high = zero();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    vf x = exp2_down(fma(load(s + t * kTile), times, shift));
    if (t * kTile < first || (t + 1) * kTile > limit) x = keep(x, first - t * kTile, limit - t * kTile, 0.0f);
    total = add(total, x);
    x = mul(x, load(c.v_scale + t * kTile));
    store(s + t * kTile, x);
    high = vmax(x, high);
  }
  *most = hmax(high);
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

// The products in s as bytes, in steps of a 254th of the largest; what rounding takes from one key is
// given to the one 32 further on, so that many small probabilities are not lost.
PL_INLINE void to_steps(const ChunkI8& c, const float* s, float most, uint8_t* bytes) {
  // with what is carried over at most 254.5, which rounds to a byte
  const vf steps = set1(most > 0 ? 254.0f / most : 0.0f);
  // two chains of what is carried: one would set the pace
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

// 16 * V dimensions from `dim` on: out += probabilities * values over the chunk's tiles
template <int R, int V>
static void weigh_i8(const AttendArgs& a, const ChunkI8& c, const uint8_t (*bytes)[kChunkKeys], const float* share,
                     int dim) {
  vi acc[R][V];
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = zeroi();
  for (int t = 0; t < c.tiles.tiles; ++t) {
    for (int u = 0; u < kTile / 4; ++u) {
      const uint8_t* values = c.tiles.v[t] + (int64_t(u) * a.head_dim + dim) * 4;
      vi w[V];
      PL_UNROLL
      for (int v = 0; v < V; ++v) w[v] = loadi(values + v * 64);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const vi x = set1i(int32_t(load_u32(bytes[r] + t * kTile + u * 4)));
        PL_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = dot_bytes(acc[r][v], x, w[v]);
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r) {
    const vf step = set1(share[r]);
    PL_UNROLL
    for (int v = 0; v < V; ++v) {
      float* out = a.out[r] + dim + v * 16;
      store(out, fma(to_float(acc[r][v]), step, load(out)));
    }
  }
}

template <int R>
static void attend_rows_i8(const AttendArgs& a) {
  alignas(64) float s[R][kChunkKeys];
  alignas(64) uint8_t bytes[R][kChunkKeys];
  alignas(64) float sums[R][16];
  float top[R], here[R], most[R], share[R];
  int32_t start[R];
  for (int r = 0; r < R; ++r) {
    top[r] = kMasked;
    store(sums[r], zero());
    int total = 0;
    for (int d = 0; d < a.head_dim; ++d) total += reinterpret_cast<const int8_t*>(a.q)[r * a.q_stride + d];
    start[r] = -128 * total;
    for (int d = 0; d < a.head_dim; d += 16) store(a.out[r] + d, zero());
  }
  const int64_t half = int64_t(a.head_dim) * kTile, tile_size = 2 * half + 2 * kTile * 4;
  for (int key = a.key_begin; key < a.key_end; key += kChunkKeys) {
    ChunkI8 c;
    find_tiles(a, key, tile_size, c.tiles);
    for (int t = 0; t < c.tiles.tiles; ++t) {
      c.tiles.v[t] = c.tiles.k[t] + half;
      c.k_scale[t] = reinterpret_cast<const float*>(c.tiles.v[t] + half);
      if (R <= 6) prefetch(c.k_scale[t]), prefetch(c.k_scale[t] + kTile);
    }
    scores_i8<R>(a, c, start, s);
    for (int t = 0; t < c.tiles.tiles; ++t)
      store(c.v_scale + t * kTile, keep(load(c.k_scale[t] + kTile), 0, a.key_end - key - t * kTile, 0.0f));
    for (int r = 0; r < R; ++r) here[r] = largest_score(a, c.tiles, r, s[r]) * a.q_scale[r];
    for (int r = 0; r < R; ++r) share[r] = soften_i8(a, c, r, s[r], here[r], &top[r], sums[r], &most[r]);
    for (int r = 0; r < R; ++r) {
      to_steps(c, s[r], most[r], bytes[r]);
      share[r] *= most[r] / 254.0f;
    }
    int dim = 0;
    constexpr int V = R <= 6 ? 4 : 2;
    for (; dim + 16 * V <= a.head_dim; dim += 16 * V) weigh_i8<R, V>(a, c, bytes, share, dim);
    for (; dim < a.head_dim; dim += 16) weigh_i8<R, 1>(a, c, bytes, share, dim);
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
