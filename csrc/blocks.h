// Products of weights in GGUF's K kinds: 256 columns of a panel are unpacked into scales in float32 and, where a value
// has more than a nibble, into bytes, which stay in the first-level cache while every tile of rows is multiplied by
// them. So unpacking is paid once, however many rows there are, and no tile needs registers for it.
//
// Included by kernels.cpp behind gemm.h or gemm_avx2.h, which have `multiply_blocks`.
#pragma once
#include "epilogue.h"

namespace PL_NAMESPACE {
using namespace paceline;

// rows whose sums are kept at a time
constexpr int64_t kBlockRows = 208;
// Blocks of nibbles that a tile goes through at a time where there are so many tiles, so that its sums stay in
// registers: their scales take 32 KB. With fewer tiles memory sets the pace, and scales are read where nibbles are
constexpr int64_t kMostBlocks = 16, kManyTiles = 6;

// One block, or several of a kind of nibbles.
struct Unpacked {
  // of a kind of nibbles, where those of the first block lie
  const uint8_t* nibbles;
  // of other kinds: units of 4 columns of all 32 rows, in the order of the columns, as in int8 panels
  alignas(64) uint8_t bytes[kBlock * kPanel];
  // one for every 16 or 32 columns
  alignas(64) float steps[kMostBlocks * kGroupsOfBlock][kPanel];
  // what is added for every 32 columns, times the sum of activations
  alignas(64) float lows[kMostBlocks * kGroupsOfBlock][kPanel];
};

// Asks for the part of the next block that lies where a group does in this one.
template <int Bytes>
PL_INLINE void expect_block(const uint8_t* block, int group) {
  constexpr int lines = Bytes / 64;
  for (int i = lines * group / kGroupsOfBlock; i < lines * (group + 1) / kGroupsOfBlock; ++i)
    prefetch(block + Bytes + i * 64);
}

// Two units from a line of nibbles, `lower` and `upper` what each has above its four bits.
PL_INLINE void put_units(uint8_t* bytes, const uint8_t* line, vi lower, vi upper) {
  const vi both = loadi(line);
  storei(bytes, ori(low_nibbles(both), lower));
  storei(bytes + 16 * kPanel, ori(high_nibbles(both), upper));
}

// Scales and minimums of 6 bits of a group, times the block's halves, as those of group `at`.
PL_INLINE void unpack_six(const uint8_t* block, int group, int64_t at, Unpacked& out) {
  const uint8_t* six = block + kQ4KScales + group * kSixBytes;
  const vi high = load_u8(six + 32);
  PL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const vi both = load_u8(six + 16 * half);
    const vi upper = bits(half ? down<2>(high) : up<2>(high), 0x3c);
    const vf scale = mul(load_half(block + 32 * half), to_float(bits(both, 63)));
    const vf low = mul(load_half(block + 64 + 32 * half), to_float(ori(down<6>(both), upper)));
    store(out.steps[at] + 16 * half, scale);
    store(out.lows[at] + 16 * half, sub(zero(), low));
  }
}

struct BlockQ4K {
  static constexpr int bytes = kQ4KBlockBytes;
  static constexpr bool nibbles = true;
  // of a group of 32 columns, that have a scale of their own
  static constexpr int parts = 1;
  PL_INLINE void unpack(const uint8_t* block, int64_t count, Unpacked& out) {
    out.nibbles = block + kQ4KNibbles;
    for (int64_t at = 0; at < count * kGroupsOfBlock; ++at) {
      const int group = int(at % kGroupsOfBlock);
      expect_block<bytes>(block, group);
      unpack_six(block, group, at, out);
      if (group == kGroupsOfBlock - 1) block += bytes;
    }
  }
};

struct BlockQ5K {
  static constexpr int bytes = kQ5KBlockBytes;
  static constexpr bool nibbles = false;
  static constexpr int parts = 1;
  PL_INLINE void unpack(const uint8_t* block, int64_t, Unpacked& out) {
    for (int group = 0; group < kGroupsOfBlock; ++group) {
      expect_block<bytes>(block, group);
      unpack_six(block, group, group, out);
      const uint8_t* line = block + kQ4KNibbles + group * kNibbleBytes;
      const uint8_t* fifth = block + kQ4KBlockBytes + group * 128;
      uint8_t* to = out.bytes + group * kGroup * kPanel;
      PL_UNROLL
      for (int half = 0; half < 128; half += 64) {
        const vi five = loadi(fifth + half);
        put_units(to + half, line + half, up<4>(bits(five, 1)), bits(five, 16));
        put_units(to + 128 + half, line + 128 + half, up<3>(bits(five, 2)), down<1>(bits(five, 32)));
        put_units(to + 256 + half, line + 256 + half, up<2>(bits(five, 4)), down<2>(bits(five, 64)));
        put_units(to + 384 + half, line + 384 + half, up<1>(bits(five, 8)), down<3>(bits(five, 128)));
      }
    }
  }
};

struct BlockQ6K {
  static constexpr int bytes = kQ6KBlockBytes;
  static constexpr bool nibbles = false;
  static constexpr int parts = 2;
  PL_INLINE void unpack(const uint8_t* block, int64_t, Unpacked& out) {
    const vf scale0 = load_half(block), scale1 = load_half(block + 32);
    for (int part = 0; part < kBlock / 16; ++part) {
      const uint8_t* scales = block + kQ6KScales + part * kPanel;
      store(out.steps[part], mul(scale0, load_s8(scales)));
      store(out.steps[part] + 16, mul(scale1, load_s8(scales + 16)));
    }
    for (int group = 0; group < kGroupsOfBlock; ++group) {
      expect_block<bytes>(block, group);
      const uint8_t* line = block + kQ6KNibbles + group * kNibbleBytes;
      const uint8_t* high = block + kQ6KHigh + group * 256;
      uint8_t* to = out.bytes + group * kGroup * kPanel;
      PL_UNROLL
      for (int two = 0; two < 512; two += 256) {
        PL_UNROLL
        for (int half = two; half < two + 128; half += 64) {
          const vi six = loadi(high + (half - two / 2));
          put_units(to + half, line + half, up<4>(bits(six, 3)), up<2>(bits(six, 12)));
          put_units(to + 128 + half, line + 128 + half, bits(six, 48), down<2>(bits(six, 192)));
        }
      }
    }
  }
};

template <class K, int R>
PL_INLINE void run_blocks(const GemmArgs& g, int64_t row, int rows, int64_t block, int64_t count, const Unpacked& in,
                          Sums* sums) {
  if constexpr (R > 1) {
    if (rows < R) return run_blocks<K, R - 1>(g, row, rows, block, count, in, sums);
  }
  multiply_blocks<K, R>(g, row, block, count, in, sums);
}

template <class K>
static void gemm_blocks(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel) {
  Unpacked unpacked;
  alignas(64) Sums sums[kBlockRows];
  const int64_t blocks = g.w.columns / kBlock;
  while (begin < end) {
    const int64_t rows = end - begin < kBlockRows ? end - begin : kBlockRows;
    // equal tiles rather than full ones and a thin rest
    const int64_t count = (rows + kBlockTileRows - 1) / kBlockTileRows;
    memset(sums, 0, size_t(rows) * sizeof(Sums));
    const uint8_t* w = g.w.data + panel * g.w.panel_bytes;
    const int64_t most = K::nibbles && count >= kManyTiles ? kMostBlocks : 1;
    for (int64_t block = 0; block < blocks; block += most, w += most * K::bytes) {
      const int64_t together = blocks - block < most ? blocks - block : most;
      K::unpack(w, together, unpacked);
      for (int64_t tile = 0, row = 0; tile < count; ++tile) {
        const int some = int((rows - row + count - tile - 1) / (count - tile));
        if (block + together == blocks) expect(g, some, begin + row, panel);
        run_blocks<K, kBlockTileRows>(g, begin + row, some, block, together, unpacked, sums + row);
        row += some;
      }
    }
    for (int64_t row = 0; row < rows; row += kBlockTileRows) {
      const int some = rows - row < kBlockTileRows ? int(rows - row) : kBlockTileRows;
      vf out[2 * kBlockTileRows];
      for (int i = 0; i < 2 * some; ++i) out[i] = load(sums[row + i / 2] + i % 2 * 16);
      finish(g, out, some, begin + row, panel);
    }
    begin += rows;
  }
}

}  // namespace PL_NAMESPACE
