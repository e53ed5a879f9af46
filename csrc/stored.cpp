// Rows of weights as files store them, to float32.
#include "stored.h"

namespace paceline {
namespace {

void decode_q45k(const uint8_t* row, int64_t group, bool fifth, float* out) {
  const uint8_t* block = row + group / kGroupsOfBlock * (fifth ? kQ5KBytes : kQ4KBytes);
  const int64_t in_block = group % kGroupsOfBlock;
  const GroupOfK own(block, in_block, fifth ? 32 : 0);
  for (int i = 0; i < 32; ++i) {
    const int high = fifth ? (block[16 + i] >> in_block & 1) << 4 : 0;
    out[i] = own.scale * float((own.low[i] >> own.shift & 15) | high) - own.minimum;
  }
}

// 128 values share 64 bytes of low bits, in two halves by nibble, and 32 bytes of two high bits.
void decode_q6k(const uint8_t* row, int64_t group, float* out) {
  const uint8_t* block = row + group / kGroupsOfBlock * kQ6KBytes;
  const int64_t half = group % kGroupsOfBlock / 4, quarter = group % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  const float scale = half_to_float(read<uint16_t>(block + 208));
  for (int part = 0; part < 32; part += 16) {
    const float step = scale * float(int8_t(block[192 + half * 8 + quarter * 2 + part / 16]));
    for (int i = part; i < part + 16; ++i) {
      const int q = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
      out[i] = step * float(q - 32);
    }
  }
}

}  // namespace

int64_t source_row_bytes(Source type, int64_t columns) {
  const bool grouped = columns % 32 == 0, blocks = columns % kBlock == 0;
  switch (type) {
    case Source::kF32: return columns * 4;
    case Source::kF16:
    case Source::kBF16: return columns * 2;
    case Source::kQ4_0: return grouped ? columns / 32 * 18 : -1;
    case Source::kQ4_1: return grouped ? columns / 32 * 20 : -1;
    case Source::kQ8_0: return grouped ? columns / 32 * 34 : -1;
    case Source::kQ4_K: return blocks ? columns / kBlock * kQ4KBytes : -1;
    case Source::kQ5_K: return blocks ? columns / kBlock * kQ5KBytes : -1;
    case Source::kQ6_K: return blocks ? columns / kBlock * kQ6KBytes : -1;
    case Source::kIQ4_NL: return grouped ? columns / 32 * 18 : -1;
    case Source::kIQ4_XS: return blocks ? columns / kBlock * 136 : -1;
    case Source::kMXFP4: return grouped ? columns / 32 * 17 : -1;
  }
  return -1;
}

void decode_row(Source type, const void* row, int64_t first, int64_t columns, float* out) {
  if (type == Source::kQ4_K || type == Source::kQ5_K || type == Source::kQ6_K) {
    for (int64_t g = 0; g < columns; g += kGroup) {
      if (type == Source::kQ6_K)
        decode_q6k(static_cast<const uint8_t*>(row), (first + g) / kGroup, out + g);
      else
        decode_q45k(static_cast<const uint8_t*>(row), (first + g) / kGroup, type == Source::kQ5_K, out + g);
    }
    return;
  }
  if (type == Source::kIQ4_NL || type == Source::kIQ4_XS || type == Source::kMXFP4) {
    for (int64_t g = 0; g < columns; g += kGroup)
      decode_table_group(type, static_cast<const uint8_t*>(row), (first + g) / kGroup, out + g);
    return;
  }
  const uint8_t* p = static_cast<const uint8_t*>(row) + (first ? source_row_bytes(type, first) : 0);
  switch (type) {
    case Source::kF32: memcpy(out, p, size_t(columns) * 4); return;
    case Source::kF16:
      for (int64_t i = 0; i < columns; ++i) out[i] = half_to_float(read<uint16_t>(p + 2 * i));
      return;
    case Source::kBF16:
      for (int64_t i = 0; i < columns; ++i) out[i] = bf16_to_float(read<uint16_t>(p + 2 * i));
      return;
    case Source::kQ4_0:
    case Source::kQ4_1: {
      const bool minimum = type == Source::kQ4_1;
      for (int64_t g = 0; g < columns; g += 32) {
        const float scale = half_to_float(read<uint16_t>(p));
        const float low = minimum ? half_to_float(read<uint16_t>(p + 2)) : -8.0f * scale;
        p += minimum ? 4 : 2;
        for (int i = 0; i < 16; ++i) {
          out[g + i] = scale * float(p[i] & 15) + low;
          out[g + 16 + i] = scale * float(p[i] >> 4) + low;
        }
        p += 16;
      }
      return;
    }
    case Source::kQ8_0:
      for (int64_t g = 0; g < columns; g += 32, p += 34) {
        const float scale = half_to_float(read<uint16_t>(p));
        for (int i = 0; i < 32; ++i) out[g + i] = scale * float(int8_t(p[2 + i]));
      }
      return;
    default: return;
  }
}

}  // namespace paceline
