// Packing of the kinds whose nibbles are places in a table of 16 numbers, see kernels.h and tables.h.
#include <cstring>

#include "convert.h"
#include "matrix.h"

namespace paceline {
namespace {

// What GGUF has of 32 columns: a half and nibbles (IQ4_NL), or an exponent and nibbles (MXFP4); of 256 (IQ4_XS) a
// half, 8 times 2 upper bits of scales, 8 times 4 lower ones, and nibbles. A byte holds columns i and i + 16 of a group.
constexpr int64_t kIQ4NLBytes = 18, kIQ4XSBytes = 136, kMXFP4Bytes = 17;

float read_half(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return half_to_float(half);
}

// 2 to the power e - 128, which float32 holds for every byte
float power(int e) { return from_bits(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23); }

// Of a group of a block of IQ4_XS: between 0 and 63, 32 more than meant.
int six_bits(const uint8_t* block, int64_t group) {
  uint16_t high;
  memcpy(&high, block + 2, 2);
  return (block[4 + group / 2] >> group % 2 * 4 & 15) | (high >> group * 2 & 3) << 4;
}

void look_up(const int8_t (&values)[16], float scale, const uint8_t* nibbles, float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * float(values[nibbles[i] & 15]);
    out[16 + i] = scale * float(values[nibbles[i] >> 4]);
  }
}

// 16 bytes of a row's nibbles among those of a panel's group.
void put(uint8_t* group, int64_t lane, const uint8_t* nibbles) {
  for (int j = 0; j < 4; ++j) memcpy(group + j * 128 + lane * 4, nibbles + j * 4, 4);
}
void get(const uint8_t* group, int64_t lane, uint8_t (&nibbles)[16]) {
  for (int j = 0; j < 4; ++j) memcpy(nibbles + j * 4, group + j * 128 + lane * 4, 4);
}

void put_bits(uint8_t* byte, int shift, int width, int value) {
  *byte = uint8_t((*byte & ~(((1 << width) - 1) << shift)) | value << shift);
}

}  // namespace

void decode_table_group(Source type, const uint8_t* row, int64_t group, float* out) {
  if (type == Source::kIQ4_NL) {
    const uint8_t* block = row + group * kIQ4NLBytes;
    return look_up(kIQ4Values, read_half(block), block + 2, out);
  }
  if (type == Source::kMXFP4) {
    const uint8_t* block = row + group * kMXFP4Bytes;
    return look_up(kMXFP4Values, power(block[0]), block + 1, out);
  }
  const uint8_t* block = row + group / kGroupsOfBlock * kIQ4XSBytes;
  const int64_t own = group % kGroupsOfBlock;
  look_up(kIQ4Values, read_half(block) * float(six_bits(block, own) - 32), block + 8 + own * 16, out);
}

void Matrix::pack_table(int64_t row, const uint8_t* in) {
  const int64_t lane = row % kPanel;
  uint8_t* out = data_ + row / kPanel * panel_bytes_;
  if (kind_ != Weights::kIQ4XS) {
    const bool half = kind_ == Weights::kIQ4NL;
    for (int64_t g = 0; g < columns_ / kGroup; ++g) {
      put(out, lane, in + (half ? 2 : 1));
      if (half)
        memcpy(out + kNibbleBytes + lane * 2, in, 2);
      else
        out[kNibbleBytes + lane] = in[0];
      in += half ? kIQ4NLBytes : kMXFP4Bytes;
      out += half ? kIQ4NLGroupBytes : kMXFP4GroupBytes;
    }
    return;
  }
  const int upper = int(lane / 16);
  for (int64_t b = 0; b < columns_ / kBlock; ++b, in += kIQ4XSBytes, out += kIQ4XSBlockBytes) {
    memcpy(out + lane * 2, in, 2);
    for (int group = 0; group < kGroupsOfBlock; ++group) {
      const int scale = six_bits(in, group);
      uint8_t* pair = out + kIQ4XSScales + group / 2 * kIQ4XSPairBytes + lane % 16;
      put_bits(pair + group % 2 * 16, upper * 4, 4, scale & 15);
      put_bits(pair + 32, group % 2 * 4 + upper * 2, 2, scale >> 4);
      put(out + kIQ4XSNibbles + group * kNibbleBytes, lane, in + 8 + group * 16);
    }
  }
}

void Matrix::unpack_table(int64_t row, float* out) const {
  const int64_t lane = row % kPanel;
  const uint8_t* in = data_ + row / kPanel * panel_bytes_;
  uint8_t nibbles[16];
  if (kind_ != Weights::kIQ4XS) {
    const bool half = kind_ == Weights::kIQ4NL;
    for (int64_t g = 0; g < columns_ / kGroup; ++g, out += kGroup) {
      get(in, lane, nibbles);
      if (half)
        look_up(kIQ4Values, read_half(in + kNibbleBytes + lane * 2), nibbles, out);
      else
        look_up(kMXFP4Values, power(in[kNibbleBytes + lane]), nibbles, out);
      in += half ? kIQ4NLGroupBytes : kMXFP4GroupBytes;
    }
    return;
  }
  const int upper = int(lane / 16);
  for (int64_t b = 0; b < columns_ / kBlock; ++b, in += kIQ4XSBlockBytes) {
    for (int group = 0; group < kGroupsOfBlock; ++group, out += kGroup) {
      const uint8_t* pair = in + kIQ4XSScales + group / 2 * kIQ4XSPairBytes + lane % 16;
      const int low = pair[group % 2 * 16] >> upper * 4 & 15, high = pair[32] >> (group % 2 * 4 + upper * 2) & 3;
      get(in + kIQ4XSNibbles + group * kNibbleBytes, lane, nibbles);
      look_up(kIQ4Values, read_half(in + lane * 2) * float((low | high << 4) - 32), nibbles, out);
    }
  }
}

}  // namespace paceline
