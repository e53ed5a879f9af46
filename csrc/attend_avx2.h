// Products of attention in registers of 256 bits, for attend.h and attend_i8.h: plain arrays of registers and
// tiles of four rows at most, for the reasons said in gemm_avx2.h. A row's result does not depend on the rows
// beside it: sums of a score run over dimensions and those of an output over tokens, one after the other.
#pragma once
#include "chunk.h"
#include "dot_avx2.h"

namespace PL_NAMESPACE {

// R rows are computed as one tile or two
template <int R>
struct Halves {
  static constexpr int first = R <= (PL_BYTE_DOTS ? 6 : 4) ? R : (R + 1) / 2, second = R - first;
};

// One unit's column c of 8 lanes, in float32.
template <class D>
PL_INLINE __m256 column_8(const uint8_t* p, int c) {
  if constexpr (D::per_unit == 1) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  return pair_column(load_8(p), c);
}

// Scores of T tiles of 16 keys; queries are float32.
template <class D, int R, int T>
PL_INLINE void scores_of(const AttendArgs& a, const uint8_t* const* k, int row, Ahead* ahead, float (*s)[kChunkKeys],
                         int key) {
  const float* q[R];
  PL_UNROLL
  for (int r = 0; r < R; ++r) q[r] = reinterpret_cast<const float*>(a.q + (row + r) * a.q_stride);
  __m256 sum[T][R][2];
  PL_UNROLL
  for (int t = 0; t < T; ++t)
    PL_UNROLL
    for (int r = 0; r < R; ++r) sum[t][r][0] = sum[t][r][1] = _mm256_setzero_ps();
  const int units = a.head_dim / D::per_unit;
  for (int u = 0; u < units; ++u) {
    if (ahead) ahead->step();
    PL_UNROLL
    for (int c = 0; c < D::per_unit; ++c) {
      PL_UNROLL
      for (int t = 0; t < T; ++t) {
        const __m256 k0 = column_8<D>(k[t] + u * 64, c), k1 = column_8<D>(k[t] + u * 64 + 32, c);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256 x = _mm256_broadcast_ss(q[r] + u * D::per_unit + c);
          sum[t][r][0] = _mm256_fmadd_ps(x, k0, sum[t][r][0]);
          sum[t][r][1] = _mm256_fmadd_ps(x, k1, sum[t][r][1]);
        }
      }
    }
  }
  PL_UNROLL
  for (int t = 0; t < T; ++t)
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      _mm256_store_ps(s[row + r] + key + t * kTile, sum[t][r][0]);
      _mm256_store_ps(s[row + r] + key + t * kTile + 8, sum[t][r][1]);
    }
}

// Few rows take several tiles at once, or the chain of dependent products would set the pace.
template <class D, int R>
static void scores_rows(const AttendArgs& a, const Chunk& c, int row, Ahead* ahead, float (*s)[kChunkKeys]) {
  constexpr int T = R == 1 ? 4 : R <= 3 ? 2 : 1;
  int t = 0;
  for (; t + T <= c.tiles; t += T) scores_of<D, R, T>(a, c.k + t, row, ahead, s, t * kTile);
  for (; t < c.tiles; ++t) scores_of<D, R, 1>(a, c.k + t, row, ahead, s, t * kTile);
}

template <class D, int R>
static void scores(const AttendArgs& a, const Chunk& c, float (*s)[kChunkKeys]) {
  constexpr int T = R == 1 ? 4 : R <= 3 ? 2 : 1;
  using H = Halves<R>;
  const int steps = (c.tiles / T + c.tiles % T) * (a.head_dim / D::per_unit);
  Ahead ahead(c.v, c.tiles, int64_t(a.head_dim) * kTile * (4 / D::per_unit), steps);
  scores_rows<D, H::first>(a, c, 0, R <= 6 ? &ahead : nullptr, s);
  if constexpr (H::second > 0) scores_rows<D, H::second>(a, c, H::first, nullptr, s);
}

// 8 * V dimensions from `dim` on: out += probabilities * values over the chunk's tiles
template <class D, int R, int V>
PL_INLINE void weigh_of(const AttendArgs& a, const Chunk& c, const float (*p)[kChunkKeys], int row, Ahead* ahead,
                        int dim) {
  __m256 sum[R][V];
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) sum[r][v] = _mm256_loadu_ps(a.out[row + r] + dim + 8 * v);
  for (int t = 0; t < c.tiles; ++t) {
    const uint8_t* values = c.v[t] + int64_t(dim) * 4;
    // Few rows wait for what `Ahead` brought no closer than the second cache: what is read a tile's time from now is
    // asked for. Past a chunk's last values that may be anything
    const uint8_t* later = t + 1 < c.tiles ? c.v[t + 1] + int64_t(dim) * 4 : c.v[0] + int64_t(dim + 8 * V) * 4;
    for (int token = 0; token < kTile; token += D::per_unit, values += int64_t(a.head_dim) * 4) {
      if (ahead) ahead->step();
      if constexpr (R <= 3) {
        PL_UNROLL
        for (int v = 0; v < V; v += 2) prefetch(later + 32 * v);
        later += int64_t(a.head_dim) * 4;
      }
      PL_UNROLL
      for (int i = 0; i < D::per_unit; ++i) {
        PL_UNROLL
        for (int v = 0; v < V; v += 2) {
          const __m256 w0 = column_8<D>(values + 32 * v, i), w1 = column_8<D>(values + 32 * v + 32, i);
          PL_UNROLL
          for (int r = 0; r < R; ++r) {
            const __m256 x = _mm256_broadcast_ss(p[row + r] + t * kTile + token + i);
            sum[r][v] = _mm256_fmadd_ps(x, w0, sum[r][v]);
            sum[r][v + 1] = _mm256_fmadd_ps(x, w1, sum[r][v + 1]);
          }
        }
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(a.out[row + r] + dim + 8 * v, sum[r][v]);
}

template <class D, int R>
static void weigh_rows(const AttendArgs& a, const Chunk& c, const float (*p)[kChunkKeys], int row, Ahead* ahead) {
  constexpr int V = R == 1 ? 8 : R <= 3 ? 4 : 2;
  int dim = 0;
  for (; dim + 8 * V <= a.head_dim; dim += 8 * V) weigh_of<D, R, V>(a, c, p, row, ahead, dim);
  for (; dim < a.head_dim; dim += 16) weigh_of<D, R, 2>(a, c, p, row, ahead, dim);
}

template <class D, int R>
static void weigh_values(const AttendArgs& a, const Chunk& c, const float (*p)[kChunkKeys]) {
  using H = Halves<R>;
  constexpr int V = H::first == 1 ? 8 : H::first <= 3 ? 4 : 2;
  const int passes = a.head_dim / (8 * V) + a.head_dim % (8 * V) / 16;
  Ahead ahead(c.next, c.next_tiles, int64_t(a.head_dim) * kTile * (4 / D::per_unit),
              passes * c.tiles * (kTile / D::per_unit));
  weigh_rows<D, H::first>(a, c, p, 0, R <= 6 ? &ahead : nullptr);
  if constexpr (H::second > 0) weigh_rows<D, H::second>(a, c, p, H::first, nullptr);
}

// Bytes: the products of two dimensions go into 16 bits, which the queries' steps see to (`reach` in encode.h).
// Those of four would make steps of a query, which is not rotated, too large.
template <int R, int T>
PL_INLINE void scores_i8_of(const AttendArgs& a, const uint8_t* const* k, const float* const* k_scale, int row,
                            const int32_t* start, Ahead* ahead, float (*s)[kChunkKeys], int key) {
  __m256i sum[T][R][2];
  PL_UNROLL
  for (int t = 0; t < T; ++t)
    PL_UNROLL
    for (int r = 0; r < R; ++r) sum[t][r][0] = sum[t][r][1] = _mm256_set1_epi32(start[row + r]);
  const uint8_t* q = a.q + row * a.q_stride;
  const int64_t stride = a.q_stride;
  for (int u = 0; u < a.head_dim / 4; ++u) {
    if (ahead) ahead->step();
    PL_UNROLL
    for (int t = 0; t < T; ++t) {
      const __m256i k0 = load_8(k[t] + u * 64), k1 = load_8(k[t] + u * 64 + 32);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_4(q + r * stride + 4 * u);
        add_twos(sum[t][r][0], k0, x);
        add_twos(sum[t][r][1], k1, x);
      }
    }
  }
  PL_UNROLL
  for (int t = 0; t < T; ++t)
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const __m256 scale = _mm256_loadu_ps(k_scale[t] + 8 * i);
        _mm256_store_ps(s[row + r] + key + t * kTile + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t][r][i]), scale));
      }
}

// Tiles of keys, and registers of values, that R rows take at a time. Without byte dots products have temporaries.
template <int R>
constexpr int kTilesI8 = R == 1 ? 4 : R <= (PL_BYTE_DOTS ? 3 : 2) ? 2 : 1;
template <int R>
constexpr int kValuesI8 = R == 1 ? 8 : R <= (PL_BYTE_DOTS ? 3 : 2) ? 4 : 2;

template <int R>
static void scores_i8_rows(const AttendArgs& a, const ChunkI8& c, int row, const int32_t* start, Ahead* ahead,
                           float (*s)[kChunkKeys]) {
  constexpr int T = kTilesI8<R>;
  int t = 0;
  for (; t + T <= c.tiles.tiles; t += T)
    scores_i8_of<R, T>(a, c.tiles.k + t, c.k_scale + t, row, start, ahead, s, t * kTile);
  for (; t < c.tiles.tiles; ++t)
    scores_i8_of<R, 1>(a, c.tiles.k + t, c.k_scale + t, row, start, ahead, s, t * kTile);
}

template <int R>
static void scores_i8(const AttendArgs& a, const ChunkI8& c, const int32_t* start, float (*s)[kChunkKeys]) {
  using H = Halves<R>;
  constexpr int T = kTilesI8<H::first>;
  const int steps = (c.tiles.tiles / T + c.tiles.tiles % T) * (a.head_dim / 4);
  Ahead ahead(c.tiles, int64_t(a.head_dim) * kTile * 2 + 2 * kTile * 4, steps);
  scores_i8_rows<H::first>(a, c, 0, start, R <= 6 ? &ahead : nullptr, s);
  if constexpr (H::second > 0) scores_i8_rows<H::second>(a, c, H::first, start, nullptr, s);
}

// Probabilities are the unsigned bytes here; four that share 16 bits add up to 258 at most, see `to_steps`.
template <int R, int V>
PL_INLINE void weigh_i8_of(const AttendArgs& a, const ChunkI8& c, const uint8_t (*bytes)[kChunkKeys],
                           const float* share, int row, int dim) {
  __m256i sum[R][V];
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int v = 0; v < V; ++v) sum[r][v] = _mm256_setzero_si256();
  const int64_t next = int64_t(a.head_dim) * 4;
  for (int t = 0; t < c.tiles.tiles; ++t) {
    for (int u = 0; u < kTile / 4; u += 2) {
      const uint8_t* values = c.tiles.v[t] + u * next + int64_t(dim) * 4;
      PL_UNROLL
      for (int v = 0; v < V; ++v) {
        const __m256i w = load_8(values + 32 * v), z = load_8(values + next + 32 * v);
        PL_UNROLL
        for (int r = 0; r < R; ++r) {
          const uint8_t* p = bytes[row + r] + t * kTile + u * 4;
          add_fours(sum[r][v], broadcast_4(p), w, broadcast_4(p + 4), z);
        }
      }
    }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r) {
    const __m256 step = _mm256_set1_ps(share[row + r]);
    PL_UNROLL
    for (int v = 0; v < V; ++v) {
      float* out = a.out[row + r] + dim + 8 * v;
      _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][v]), step, _mm256_loadu_ps(out)));
    }
  }
}

template <int R>
static void weigh_i8_rows(const AttendArgs& a, const ChunkI8& c, const uint8_t (*bytes)[kChunkKeys],
                          const float* share, int row) {
  constexpr int V = kValuesI8<R>;
  int dim = 0;
  for (; dim + 8 * V <= a.head_dim; dim += 8 * V) weigh_i8_of<R, V>(a, c, bytes, share, row, dim);
  for (; dim < a.head_dim; dim += 16) weigh_i8_of<R, 2>(a, c, bytes, share, row, dim);
}

template <int R>
static void weigh_i8_values(const AttendArgs& a, const ChunkI8& c, const uint8_t (*bytes)[kChunkKeys],
                            const float* share) {
  using H = Halves<R>;
  weigh_i8_rows<H::first>(a, c, bytes, share, 0);
  if constexpr (H::second > 0) weigh_i8_rows<H::second>(a, c, bytes, share, H::first);
}

}  // namespace PL_NAMESPACE
