// Products of attention, for AVX-512 and plain C++; attend_avx2.h has those for 256 bits.
#pragma once
#include "chunk.h"

namespace PL_NAMESPACE {

template <class D, int R>
static void scores(const AttendArgs& a, const Chunk& c, float (*s)[kChunkKeys]) {
  const int units = a.head_dim / D::per_unit;
  int t = 0;
  Ahead ahead(c, int64_t(a.head_dim) * kTile * (8 / D::per_unit), (c.tiles + 1) / 2 * units);
  for (; t + 2 <= c.tiles; t += 2) {
    vf acc0[R], acc1[R];
    PL_UNROLL
    for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = zero();
    for (int u = 0; u < units; ++u) {
      const auto k0 = D::weight(c.k[t] + u * 64), k1 = D::weight(c.k[t + 1] + u * 64);
      if constexpr (R <= 6) ahead.step();
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto x = D::value(a.q + r * a.q_stride + 4 * u);
        acc0[r] = D::dot(acc0[r], x, k0);
        acc1[r] = D::dot(acc1[r], x, k1);
      }
    }
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      store(s[r] + t * kTile, acc0[r]);
      store(s[r] + (t + 1) * kTile, acc1[r]);
    }
  }
  for (; t < c.tiles; ++t) {
    vf acc[R];
    PL_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int u = 0; u < units; ++u) {
      const auto k = D::weight(c.k[t] + u * 64);
      PL_UNROLL
      for (int r = 0; r < R; ++r) acc[r] = D::dot(acc[r], D::value(a.q + r * a.q_stride + 4 * u), k);
      if constexpr (R <= 6) ahead.step();
    }
    PL_UNROLL
    for (int r = 0; r < R; ++r) store(s[r] + t * kTile, acc[r]);
  }
}

// 16 * V dimensions from `dim` on: acc += probabilities * values over the chunk's tiles
template <class D, int R, int V>
static void weigh(const AttendArgs& a, const Chunk& c, const uint8_t* p, int64_t p_stride, int dim) {
  constexpr int per_tile = kTile / D::per_unit;
  vf acc[R][V];
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = load(a.out[r] + dim + v * 16);
  for (int t = 0; t < c.tiles; ++t) {
    for (int u = 0; u < per_tile; ++u) {
      const uint8_t* row = c.v[t] + (int64_t(u) * a.head_dim + dim) * 4;
      typename D::Weight w[V];
      PL_UNROLL
      for (int v = 0; v < V; ++v) w[v] = D::weight(row + v * 64);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto x = D::value(p + r * p_stride + (t * per_tile + u) * 4);
        PL_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = D::dot(acc[r][v], x, w[v]);
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) store(a.out[r] + dim + v * 16, acc[r][v]);
}

template <class D, int R>
static void weigh_values(const AttendArgs& a, const Chunk& c, const float (*s)[kChunkKeys]) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(s);
  int dim = 0;
  constexpr int V = R <= 6 ? 4 : 2;
  for (; dim + 16 * V <= a.head_dim; dim += 16 * V) weigh<D, R, V>(a, c, p, sizeof(s[0]), dim);
  for (; dim < a.head_dim; dim += 16) weigh<D, R, 1>(a, c, p, sizeof(s[0]), dim);
}

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
#if !PL_BYTE_DOTS
    for (int u = 0; u < kTile / 4; u += 2) {
      const int64_t next = int64_t(a.head_dim) * 4;
      const uint8_t* values = c.tiles.v[t] + u * next + dim * 4;
      PL_UNROLL
      for (int v = 0; v < V; ++v) {
        const vi w = loadi(values + v * 64), z = loadi(values + next + v * 64);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const uint8_t* p = bytes[r] + t * kTile + u * 4;
          acc[r][v] = dot_fours(acc[r][v], set1i(int32_t(load_u32(p))), w, set1i(int32_t(load_u32(p + 4))), z);
        }
      }
    }
#else
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
#endif
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
static void weigh_i8_values(const AttendArgs& a, const ChunkI8& c, const uint8_t (*bytes)[kChunkKeys],
                            const float* share) {
  int dim = 0;
  constexpr int V = R <= 6 ? 4 : 2;
  for (; dim + 16 * V <= a.head_dim; dim += 16 * V) weigh_i8<R, V>(a, c, bytes, share, dim);
  for (; dim < a.head_dim; dim += 16) weigh_i8<R, 1>(a, c, bytes, share, dim);
}

}  // namespace PL_NAMESPACE
