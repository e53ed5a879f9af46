#include "matrix.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "stored.h"

namespace paceline {
namespace {

// between rows of floats that are packed together: 32 at a multiple of 4 KiB would share one set of the cache
constexpr int64_t kRowGap = 16;

int unit_columns(Weights kind) {
  return kind == Weights::kF32 ? 1 : kind == Weights::kBF16 ? 2 : 4;
}

// Values of one column, a row of a panel each.
using Lanes = float[kPanel];

// the larger of two, or what is not a number
float larger(float top, float x) { return x <= top || top != top ? top : x; }

// A group of 32 values to 16 levels from the least to the most of them. Plain loops over lanes, which become vector
// code: calls of nearbyint and its like, one for each value, took most of a start. What is not a number has no place
// among levels: the scale says it.
void round_group(const float* x, uint16_t* scale, uint16_t* low, uint8_t* levels) {
  constexpr int lanes = 8;
  float least[lanes], most[lanes];
  for (int j = 0; j < lanes; ++j) least[j] = most[j] = x[j];
  for (int i = lanes; i < kGroup; i += lanes)
    for (int j = 0; j < lanes; ++j) {
      least[j] = x[i + j] < least[j] ? x[i + j] : least[j];
      most[j] = larger(most[j], x[i + j]);
    }
  for (int j = 1; j < lanes; ++j) {
    least[0] = least[j] < least[0] ? least[j] : least[0];
    most[0] = larger(most[0], most[j]);
  }
  *low = float_to_half(least[0]);
  *scale = float_to_half((most[0] - half_to_float(*low)) / 15.0f);
  const float from = half_to_float(*low), step = half_to_float(*scale);
  if (!(step > 0)) {
    memset(levels, 0, kGroup);
    return;
  }
  float shifted[kGroup];
  uint32_t bits[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    float q = (x[i] - from) / step;
    q = q > 0.0f ? q : 0.0f;
    q = q < 15.0f ? q : 15.0f;
    // adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits
    shifted[i] = q + 12582912.0f;
  }
  memcpy(bits, shifted, sizeof bits);
  for (int i = 0; i < kGroup; ++i) levels[i] = uint8_t(bits[i] & 15u);
}

// The power of two of which 4-bit weights have whole numbers of 16 bits for scales and minimums, the largest of them
// `top`. Halves that are at least a sixteenth of it lose nothing. NaN where there is none.
float step_of(float top) {
  if (!(top < INFINITY)) return NAN;
  return top > 0 ? std::ldexp(1.0f, std::ilogb(top) - 14) : 1.0f;
}

uint16_t steps_of(float x, float step) {
  const float steps = x / step;
  // not for what is not a number
  if (!(std::fabs(steps) < 65536)) return 0;
  const long whole = std::lrint(steps);
  return uint16_t(int16_t(whole > 32767 ? 32767 : whole < -32767 ? -32767 : whole));
}

}  // namespace

void Matrix::check_kind(Weights kind, int64_t columns) {
  const bool grouped = kind == Weights::kIQ4NL || kind == Weights::kMXFP4;
  const bool four = kind == Weights::kQ4 || kind == Weights::kQ40 || grouped, block = kind >= Weights::kQ4K && !grouped;
  if (int(kind) < 0 || int(kind) >= kWeightKinds)
    throw std::invalid_argument("unknown weight kind " + std::to_string(int(kind)));
  if (four && columns % kGroup != 0)
    throw std::invalid_argument("4-bit weights need whole groups of 32 columns, got " + std::to_string(columns));
  if (block && columns % kBlock != 0)
    throw std::invalid_argument("K kinds and IQ4_XS need whole blocks of 256 columns, got " + std::to_string(columns));
}

Matrix::Matrix(Weights kind, int64_t rows, int64_t columns, Arena& arena)
    : kind_(kind), rows_(rows), columns_(columns) {
  check_kind(kind, columns);
  const int g = unit_columns(kind);
  units_ = (columns + g - 1) / g;
  switch (kind) {
    case Weights::kQ4: panel_bytes_ = columns / kGroup * kQ4GroupBytes; break;
    case Weights::kQ40: panel_bytes_ = columns / kGroup * kQ40GroupBytes; break;
    case Weights::kQ4K: panel_bytes_ = columns / kBlock * kQ4KBlockBytes; break;
    case Weights::kQ5K: panel_bytes_ = columns / kBlock * kQ5KBlockBytes; break;
    case Weights::kQ6K: panel_bytes_ = columns / kBlock * kQ6KBlockBytes; break;
    case Weights::kIQ4NL: panel_bytes_ = columns / kGroup * kIQ4NLGroupBytes; break;
    case Weights::kIQ4XS: panel_bytes_ = columns / kBlock * kIQ4XSBlockBytes; break;
    case Weights::kMXFP4: panel_bytes_ = columns / kGroup * kMXFP4GroupBytes; break;
    default: panel_bytes_ = units_ * kPanel * 4;
  }
  data_ = arena.take(size_t(panel_count() * panel_bytes_));
  if (kind == Weights::kI8 || kind == Weights::kQ4 || kind == Weights::kQ40) {
    // zero for the rows that fill up the last panel, whatever their bytes
    scale_ = reinterpret_cast<float*>(arena.take(size_t(panel_count()) * kPanel * 4));
  }
}

bool Matrix::takes(Source type) const {
  switch (kind_) {
    case Weights::kQ40: return type == Source::kQ4_0;
    case Weights::kQ4K: return type == Source::kQ4_K;
    case Weights::kQ5K: return type == Source::kQ5_K;
    case Weights::kQ6K: return type == Source::kQ6_K;
    case Weights::kIQ4NL: return type == Source::kIQ4_NL;
    case Weights::kIQ4XS: return type == Source::kIQ4_XS;
    case Weights::kMXFP4: return type == Source::kMXFP4;
    default: return true;
  }
}

Panels Matrix::view() const {
  Panels p;
  p.data = data_;
  p.scale = scale_;
  p.panel_bytes = panel_bytes_;
  p.rows = rows_;
  p.columns = columns_;
  p.units = units_;
  return p;
}

void Matrix::pack_q4(int64_t row, Source type, const void* source, float* scratch) {
  const bool stored = type == Source::kQ4_0 || type == Source::kQ4_1;
  const uint8_t* in = static_cast<const uint8_t*>(source);
  if (!stored && type != Source::kQ4_K) decode_row(type, source, 0, columns_, scratch);
  const int64_t lane = row % kPanel, groups = columns_ / kGroup;
  uint8_t* const panel = data_ + row / kPanel * panel_bytes_;
  // of nibbles - 8: a scale and a minimum of each group
  float *scales = scratch + columns_, *lows = scales + groups, top = 0;
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t nibbles[16];
    float low;
    if (stored) {
      scales[g] = half_to_float(read<uint16_t>(in));
      low = type == Source::kQ4_1 ? half_to_float(read<uint16_t>(in + 2)) : -8.0f * scales[g];
      in += type == Source::kQ4_1 ? 4 : 2;
      memcpy(nibbles, in, 16);
      in += 16;
    } else if (type == Source::kQ4_K) {
      const GroupOfK group(in + g / kGroupsOfBlock * kQ4KBytes, g % kGroupsOfBlock);
      scales[g] = group.scale;
      low = -group.minimum;
      for (int i = 0; i < 16; ++i)
        nibbles[i] = uint8_t((group.low[i] >> group.shift & 15) | (group.low[i + 16] >> group.shift & 15) << 4);
    } else {
      uint16_t scale, least;
      uint8_t levels[kGroup];
      round_group(scratch + g * kGroup, &scale, &least, levels);
      scales[g] = half_to_float(scale);
      low = half_to_float(least);
      for (int i = 0; i < 16; ++i) nibbles[i] = uint8_t(levels[i] | levels[i + 16] << 4);
    }
    lows[g] = low + 8.0f * scales[g];
    top = larger(larger(top, std::fabs(scales[g])), std::fabs(lows[g]));
    uint8_t* out = panel + g * kQ4GroupBytes;
    for (int j = 0; j < 4; ++j) memcpy(out + j * 128 + lane * 4, nibbles + j * 4, 4);
  }
  const float step = scale_[row] = step_of(top);
  for (int64_t g = 0; g < groups; ++g) {
    const uint16_t pair[2] = {steps_of(scales[g], step), steps_of(lows[g], step)};
    memcpy(panel + g * kQ4GroupBytes + kNibbleBytes + lane * 4, pair, 4);
  }
}

namespace {

// Values of 6 bits for a row, in the nibbles and the planes above them of one group; see kernels.h.
void put_nibbles(uint8_t* group, int64_t lane, const uint8_t (&values)[kGroup]) {
  uint8_t both[16];
  for (int i = 0; i < 16; ++i) both[i] = uint8_t((values[i] & 15) | (values[i + 16] & 15) << 4);
  for (int j = 0; j < 4; ++j) memcpy(group + j * 128 + lane * 4, both + j * 4, 4);
}
void get_nibbles(const uint8_t* group, int64_t lane, uint8_t (&values)[kGroup]) {
  for (int i = 0; i < 16; ++i) {
    const uint8_t both = group[i / 4 * 128 + lane * 4 + i % 4];
    values[i] = both & 15;
    values[i + 16] = both >> 4;
  }
}
// where the upper two bits of a column of Q6_K are: byte of the group's plane, and shift
struct HighBits {
  HighBits(int column, int64_t lane) {
    const int unit = column / 4 % 4, upper = column / 16;
    at = unit / 2 * 128 + lane * 4 + column % 4;
    shift = unit % 2 * 4 + upper * 2;
  }
  int64_t at;
  int shift;
};

}  // namespace

// One row of GGUF's blocks of this kind.
void Matrix::pack_block(int64_t row, const uint8_t* in) {
  if (kind_ >= Weights::kIQ4NL) return pack_table(row, in);
  const int64_t lane = row % kPanel;
  uint8_t* out = data_ + row / kPanel * panel_bytes_;
  if (kind_ == Weights::kQ40) {
    const int64_t groups = columns_ / kGroup;
    float top = 0;
    for (int64_t g = 0; g < groups; ++g) top = larger(top, std::fabs(half_to_float(read<uint16_t>(in + g * 18))));
    const float step = scale_[row] = step_of(top);
    for (int64_t g = 0; g < groups; ++g, in += 18, out += kQ40GroupBytes) {
      for (int j = 0; j < 4; ++j) memcpy(out + j * 128 + lane * 4, in + 2 + j * 4, 4);
      const uint16_t scale = steps_of(half_to_float(read<uint16_t>(in)), step);
      memcpy(out + kNibbleBytes + lane * 2, &scale, 2);
    }
    return;
  }
  const bool six = kind_ == Weights::kQ6K, fifth = kind_ == Weights::kQ5K;
  for (int64_t b = 0; b < columns_ / kBlock; ++b) {
    if (six) {
      memcpy(out + lane * 2, in + 208, 2);
      for (int part = 0; part < kBlock / 16; ++part) out[kQ6KScales + part * kPanel + lane] = in[192 + part];
    } else {
      memcpy(out + lane * 2, in, 2);
      memcpy(out + 64 + lane * 2, in + 2, 2);
    }
    for (int group = 0; group < kGroupsOfBlock; ++group) {
      uint8_t values[kGroup];
      if (six) {
        const int quarter = group % 4;
        const uint8_t *low = in + group / 4 * 64 + quarter % 2 * 32, *high = in + 128 + group / 4 * 32;
        uint8_t upper[kGroup];
        for (int i = 0; i < kGroup; ++i) values[i] = low[i] >> quarter / 2 * 4 & 15;
        for (int i = 0; i < kGroup; ++i) upper[i] = high[i] >> quarter * 2 & 3;
        // as HighBits says
        for (int two = 0; two < 2; ++two) {
          const uint8_t* of = upper + two * 8;
          uint8_t* plane = out + kQ6KHigh + group * 256 + two * 128 + lane * 4;
          for (int j = 0; j < 4; ++j)
            plane[j] = uint8_t(of[j] | of[j + 16] << 2 | of[j + 4] << 4 | of[j + 20] << 6);
        }
        put_nibbles(out + kQ6KNibbles + group * kNibbleBytes, lane, values);
        continue;
      }
      const GroupOfK own(in, group, fifth ? 32 : 0);
      for (int i = 0; i < kGroup; ++i) values[i] = own.low[i] >> own.shift & 15;
      put_nibbles(out + kQ4KNibbles + group * kNibbleBytes, lane, values);
      uint8_t* scales = out + kQ4KScales + group * kSixBytes;
      scales[lane] = uint8_t(own.factor | (own.lowest & 3) << 6);
      const int shift = int(lane / 16) * 4;
      scales[32 + lane % 16] = uint8_t((scales[32 + lane % 16] & ~(15 << shift)) | own.lowest >> 2 << shift);
      if (!fifth) continue;
      uint8_t* plane = out + kQ4KBlockBytes + group * 128 + lane * 4;
      for (int j = 0; j < 4; ++j) {
        int bits = 0;
        for (int unit = 0; unit < 8; ++unit) bits |= (in[16 + unit * 4 + j] >> group & 1) << unit;
        plane[j] = uint8_t(bits);
      }
    }
    in += six ? kQ6KBytes : fifth ? kQ5KBytes : kQ4KBytes;
    out += six ? kQ6KBlockBytes : fifth ? kQ5KBlockBytes : kQ4KBlockBytes;
  }
}

void Matrix::unpack_block(int64_t row, float* out) const {
  const int64_t lane = row % kPanel;
  const uint8_t* in = data_ + row / kPanel * panel_bytes_;
  const bool six = kind_ == Weights::kQ6K, fifth = kind_ == Weights::kQ5K;
  for (int64_t b = 0; b < columns_ / kBlock; ++b) {
    for (int group = 0; group < kGroupsOfBlock; ++group, out += kGroup) {
      uint8_t values[kGroup];
      const float factor = half_to_float(read<uint16_t>(in + lane * 2));
      if (six) {
        get_nibbles(in + kQ6KNibbles + group * kNibbleBytes, lane, values);
        const uint8_t* plane = in + kQ6KHigh + group * 256;
        for (int i = 0; i < kGroup; ++i) {
          const HighBits bits(i, lane);
          const float scale = factor * float(int8_t(in[kQ6KScales + (group * 2 + i / 16) * kPanel + lane]));
          out[i] = scale * float((values[i] | (plane[bits.at] >> bits.shift & 3) << 4) - 32);
        }
        continue;
      }
      get_nibbles(in + kQ4KNibbles + group * kNibbleBytes, lane, values);
      const uint8_t* scales = in + kQ4KScales + group * kSixBytes;
      const int lowest = scales[lane] >> 6 | (scales[32 + lane % 16] >> lane / 16 * 4 & 15) << 2;
      const float scale = factor * float(scales[lane] & 63);
      const float minimum = half_to_float(read<uint16_t>(in + 64 + lane * 2)) * float(lowest);
      const uint8_t* plane = in + kQ4KBlockBytes + group * 128 + lane * 4;
      for (int i = 0; i < kGroup; ++i)
        out[i] = scale * float(values[i] | (fifth ? (plane[i % 4] >> i / 4 & 1) << 4 : 0)) - minimum;
    }
    in += six ? kQ6KBlockBytes : fifth ? kQ5KBlockBytes : kQ4KBlockBytes;
  }
}

size_t Matrix::pack_scratch() const {
  if (kind_ >= Weights::kQ40) return 0;
  if (kind_ == Weights::kQ4) return size_t(columns_ + 2 * (columns_ / kGroup));
  return size_t((padded_columns() + (kind_ == Weights::kI8 ? kRowGap : 0)) * kPanel);
}

// Each row is decoded and rotated, and its scale found. Then the bytes of 64 columns are made of all rows, and the
// panel is written in order.
void Matrix::pack_i8(int64_t row, int64_t count, Source type, const uint8_t* from, int64_t stride,
                     const Kernels& kernels, float* scratch) {
  const int64_t padded = padded_columns(), apart = padded + kRowGap;
  float factor[kPanel];
  for (int64_t r = 0; r < count; ++r) {
    float* x = scratch + r * apart;
    decode_row(type, from + r * stride, 0, columns_, x);
    for (int64_t i = columns_; i < padded; ++i) x[i] = 0;
    float top = kernels.rotate(x, columns_);
    // its maximum may pass over what is not a number
    bool missing = false;
    for (int64_t i = 0; i < columns_; ++i) missing |= x[i] != x[i];
    if (missing) top = NAN;
    // none where it is no finite number: what is below 2^-120 is nothing beside other weights
    const float steps = 127.0f / top;
    factor[r] = steps < INFINITY ? steps : 0.0f;
    scale_[row + r] = top / 127.0f;
  }
  uint8_t* out = data_ + row / kPanel * panel_bytes_ + row % kPanel * 4;
  alignas(64) uint8_t bytes[kPanel][kActGroup];
  for (int64_t c = 0; c < columns_; c += kActGroup) {
    for (int64_t r = 0; r < count; ++r) {
      if (factor[r] > 0)
        kernels.quantize_u8(scratch + r * apart + c, kActGroup, factor[r], bytes[r]);
      else  // zeros: not even zero times what is not finite is a number, and levels differ in what integer that becomes
        memset(bytes[r], 128, kActGroup);
    }
    const int64_t units = units_ - c / 4 < kActGroup / 4 ? units_ - c / 4 : kActGroup / 4;
    for (int64_t u = 0; u < units; ++u, out += kPanel * 4)
      for (int64_t r = 0; r < count; ++r) memcpy(out + r * 4, bytes[r] + u * 4, 4);
  }
}

// Row by row, every value would go to a cache line of its own. So the values are turned first, and the
// panel is written in order.
void Matrix::pack_rows(int64_t row, int64_t count, Source type, const void* source, int64_t stride,
                       const Kernels& kernels, float* scratch) {
  const uint8_t* from = static_cast<const uint8_t*>(source);
  if (kind_ >= Weights::kQ40) {
    for (int64_t r = 0; r < count; ++r) pack_block(row + r, from + r * stride);
    return;
  }
  if (kind_ == Weights::kQ4) {
    for (int64_t r = 0; r < count; ++r) pack_q4(row + r, type, from + r * stride, scratch);
    return;
  }
  if (kind_ == Weights::kI8) return pack_i8(row, count, type, from, stride, kernels, scratch);
  // [columns, kPanel]; what is beyond the rows and columns is zero
  Lanes* turned = reinterpret_cast<Lanes*>(scratch);
  for (int64_t c = 0; c < columns_; c += kActGroup) {
    const int64_t width = columns_ - c < kActGroup ? columns_ - c : kActGroup;
    float values[kActGroup] = {};
    if (count < kPanel) memset(turned + c, 0, sizeof(Lanes) * kActGroup);
    for (int64_t r = 0; r < count; ++r) {
      decode_row(type, from + r * stride, c, width, values);
      for (int64_t i = 0; i < kActGroup; ++i) turned[c + i][r] = values[i];
    }
  }
  uint8_t* out = data_ + row / kPanel * panel_bytes_ + row % kPanel * 4;
  for (int64_t u = 0; u < units_; ++u) {
    uint32_t words[kPanel];
    if (kind_ == Weights::kF32) {
      memcpy(words, turned[u], sizeof words);
    } else {
      for (int lane = 0; lane < kPanel; ++lane)
        words[lane] = float_to_bf16(turned[2 * u][lane]) | uint32_t(float_to_bf16(turned[2 * u + 1][lane])) << 16;
    }
    memcpy(out + u * kPanel * 4, words, size_t(count) * 4);
  }
}

void Matrix::unpack_row(int64_t row, const Kernels& kernels, float* out) const {
  if (kind_ >= Weights::kIQ4NL) return unpack_table(row, out);
  if (kind_ >= Weights::kQ4K) return unpack_block(row, out);
  const uint8_t* p = data_ + row / kPanel * panel_bytes_;
  const int64_t lane = row % kPanel;
  if (kind_ == Weights::kQ4 || kind_ == Weights::kQ40) {
    const bool minimum = kind_ == Weights::kQ4;
    const int64_t group_bytes = minimum ? kQ4GroupBytes : kQ40GroupBytes, width = minimum ? 4 : 2;
    const float step = scale_[row];
    for (int64_t g = 0; g < columns_; g += kGroup, p += group_bytes) {
      const uint8_t* own = p + kNibbleBytes + lane * width;
      const int scale = read<int16_t>(own), low = minimum ? read<int16_t>(own + 2) : 0;
      uint8_t values[kGroup];
      get_nibbles(p, lane, values);
      for (int i = 0; i < kGroup; ++i) out[g + i] = step * float(scale * (values[i] - 8) + low);
    }
    return;
  }
  p += lane * 4;
  constexpr int64_t step = kPanel * 4;
  const float scale = kind_ == Weights::kI8 ? scale_[row] : 1.0f;
  const int g = unit_columns(kind_);
  for (int64_t i = 0; i < columns_; ++i) {
    const uint8_t* unit = p + i / g * step;
    if (kind_ == Weights::kF32)
      out[i] = read<float>(unit);
    else if (kind_ == Weights::kBF16)
      out[i] = bf16_to_float(read<uint16_t>(unit + i % 2 * 2));
    else
      out[i] = scale * float(int(unit[i % 4]) - 128);
  }
  // its own inverse
  if (kind_ == Weights::kI8) kernels.rotate(out, columns_);
}

}  // namespace paceline
