// Attention over the paged cache: up to twelve query rows of one KV head against its tiles.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace PL_NAMESPACE {
using namespace paceline;

// rows are registers: fewer where registers are few (and the portable variant compiles in seconds)
#if PL_LEVEL >= 2
constexpr int kRows = kMaxRows;
#elif PL_LEVEL == 1
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif
constexpr float kMasked = -1e30f;
constexpr int kChunkKeys = kChunkTiles * kTile;

// The tiles of one chunk of keys.
struct Chunk {
  const uint8_t* k[kChunkTiles];
  const uint8_t* v[kChunkTiles];
  // keys of the chunk that follows, of this item or the next
  const uint8_t* next[kChunkTiles];
  int tiles;
  int next_tiles;
  int first_key;
};

PL_INLINE int chunk_tiles(int key, int end) {
  const int tiles = (end - key + kTile - 1) / kTile;
  return tiles < kChunkTiles ? tiles : kChunkTiles;
}

PL_INLINE const uint8_t* tile_at(const AttendArgs& a, const int32_t* table, int head, int tile, int64_t bytes) {
  // divisions take longer than a tile's scores of a few rows
  if (a.tiles_per_block == 1) return a.layer + int64_t(table[tile]) * a.block_bytes + head * a.head_bytes;
  return a.layer + int64_t(table[tile / a.tiles_per_block]) * a.block_bytes + head * a.head_bytes +
         tile % a.tiles_per_block * bytes;
}

// k and next of the chunk that starts at `key`
PL_INLINE void find_tiles(const AttendArgs& a, int key, int64_t bytes, Chunk& c) {
  c.first_key = key;
  c.tiles = chunk_tiles(key, a.key_end);
  for (int t = 0; t < c.tiles; ++t) c.k[t] = tile_at(a, a.table, a.kv_head, key / kTile + t, bytes);
  const bool more = key + kChunkKeys < a.key_end;
  const int from = more ? key + kChunkKeys : a.next_begin;
  c.next_tiles = more || a.next_end ? chunk_tiles(from, more ? a.key_end : a.next_end) : 0;
  for (int t = 0; t < c.next_tiles; ++t)
    c.next[t] = tile_at(a, more ? a.table : a.next_table, more ? a.kv_head : a.next_head, from / kTile + t, bytes);
}

// Tiles lie scattered over the pool, so hardware prefetchers lose the thread at every one. With few
// rows, when memory sets the pace, all of the next chunk is asked for while this one's scores are
// computed, a few lines at a time.
class Ahead {
 public:
  // steps: how often `step` will be called
  PL_INLINE_MEMBER Ahead(const Chunk& c, int64_t tile_bytes, int steps)
      : tile_(c.next), lines_(int(tile_bytes / 64)), left_(c.next_tiles * lines_),
        each_(steps > 0 ? (left_ + steps - 1) / steps : 0) {}

  PL_INLINE_MEMBER void step() {
    for (int i = 0; i < each_ && left_ > 0; ++i, --left_) {
      prefetch_l2(*tile_ + line_ * 64);
      if (++line_ == lines_) {
        line_ = 0;
        ++tile_;
      }
    }
  }

 private:
  const uint8_t* const* tile_;
  int line_ = 0, lines_, left_, each_;
};

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
    if constexpr (D::per_unit == 2)
      store_bf16(reinterpret_cast<uint16_t*>(s) + t * kTile, x);
    else
      store(s + t * kTile, x);
  }
  if (now != *top) {
    float f[16];
    store(f, exp2v(set1(*top - now)));
    *sum *= f[0];
    for (int d = 0; d < a.head_dim; d += 16)
      store(a.out[r] + d, mul(load(a.out[r] + d), set1(f[0])));
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
  for (int key = a.key_begin; key < a.key_end; key += kChunkKeys) {
    Chunk c;
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
    const uint8_t* p = reinterpret_cast<const uint8_t*>(s);
    // one loop after the other: a row waits for its largest score, and others can go on
    for (int r = 0; r < R; ++r) here[r] = largest_score(a, c, r, s[r]);
    for (int r = 0; r < R; ++r) soften<D>(a, c, r, s[r], here[r], &top[r], &sum[r]);
    int dim = 0;
    constexpr int V = R <= 6 ? 4 : 2;
    for (; dim + 16 * V <= a.head_dim; dim += 16 * V) weigh<D, R, V>(a, c, p, sizeof(s[0]), dim);
    for (; dim < a.head_dim; dim += 16) weigh<D, R, 1>(a, c, p, sizeof(s[0]), dim);
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

// parts: `count` runs of [head_dim outputs, maximum, sum], `stride` floats apart
static void merge_partials(const float* parts, int count, int64_t stride, int head_dim, float* out) {
  float top = kMasked, total = 0;
  for (int i = 0; i < count; ++i) {
    const float x = parts[i * stride + head_dim];
    top = x > top ? x : top;
  }
  for (int d = 0; d < head_dim; d += 16) store(out + d, zero());
  for (int i = 0; i < count; ++i) {
    const float* part = parts + i * stride;
    float f[16];
    store(f, exp2v(set1(part[head_dim] - top)));
    total += f[0] * part[head_dim + 1];
    for (int d = 0; d < head_dim; d += 16) store(out + d, fma(set1(f[0]), load(part + d), load(out + d)));
  }
  const vf scale = set1(total > 0 ? 1.0f / total : 0.0f);
  for (int d = 0; d < head_dim; d += 16) store(out + d, mul(load(out + d), scale));
}

}  // namespace PL_NAMESPACE
