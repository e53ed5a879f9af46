// Runs of keys that attention takes at a time, and where their tiles are.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace PL_NAMESPACE {
using namespace paceline;

// rows are registers: fewer where registers are few (and the portable variant compiles in seconds)
#if PL_LEVEL >= 2
constexpr int kRows = kMaxRows;
#elif PL_LEVEL == 1
constexpr int kRows = PL_BYTE_DOTS ? 12 : 8;
#else
constexpr int kRows = 2;
#endif
// Whether queries and probabilities beside bfloat16 keys and values are bfloat16 too, or float32
constexpr bool kBF16Pairs = PL_LEVEL != 1;
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

// Chunks end at multiples of kChunkKeys wherever the first begins, so that what a row adds up does not depend on
// which rows are computed with it.
PL_INLINE int chunk_tiles(int key, int end) {
  const int next = (key / kChunkKeys + 1) * kChunkKeys;
  return ((end < next ? end : next) - key + kTile - 1) / kTile;
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
  const int after = key + c.tiles * kTile;
  const bool more = after < a.key_end;
  const int from = more ? after : a.next_begin;
  c.next_tiles = more || a.next_end ? chunk_tiles(from, more ? a.key_end : a.next_end) : 0;
  for (int t = 0; t < c.next_tiles; ++t)
    c.next[t] = tile_at(a, more ? a.table : a.next_table, more ? a.kv_head : a.next_head, from / kTile + t, bytes);
}

// Tiles lie scattered over the pool, so hardware prefetchers lose the thread at every one. With few
// rows, when memory sets the pace, what is read later is asked for a few lines at a time: all of the
// next chunk while this one's scores are computed, or, for float kinds in 256 bits, this one's values
// then, and the next one's keys while values are weighed, so that memory has work all the time.
class Ahead {
 public:
  // tile_bytes: of each tile, from its beginning; steps: how often `step` will be called
  PL_INLINE_MEMBER Ahead(const Chunk& c, int64_t tile_bytes, int steps)
      : Ahead(c.next, c.next_tiles, tile_bytes, steps) {}
  PL_INLINE_MEMBER Ahead(const uint8_t* const* tiles, int count, int64_t tile_bytes, int steps)
      : tile_(tiles), lines_(int(tile_bytes / 64)), left_(count * lines_),
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

struct ChunkI8 {
  Chunk tiles;
  const float* k_scale[kChunkTiles];
  // scales of the values; zero for slots never written, whose scales may be NaN
  alignas(64) float v_scale[kChunkKeys];
};

}  // namespace PL_NAMESPACE
