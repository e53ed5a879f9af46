// GGUF's stored blocks, for what reads them (stored.cpp) and what packs them as they are (matrix.cpp).
#pragma once
#include <cstring>

#include "convert.h"
#include "matrix.h"

namespace paceline {

template <class T>
T read(const uint8_t* p) {
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}

// What GGUF calls K: blocks of 256 values in groups of 32, whose scales and minimums are whole numbers of 6
// bits times two halves of the block. Q6_K has no minimums and a scale of 8 bits for each 16 values.
constexpr int64_t kQ4KBytes = 144, kQ5KBytes = 176, kQ6KBytes = 210;

// One group of a block of Q4_K or Q5_K: a value is scale * q - minimum.
struct GroupOfK {
  // `low` is where the low bits begin; Q5_K has 32 bytes of fifth bits between the scales and them
  GroupOfK(const uint8_t* block, int64_t group, int64_t between = 0) {
    const uint8_t* six = block + 4;
    if (group < 4) {
      factor = six[group] & 63;
      lowest = six[group + 4] & 63;
    } else {
      factor = (six[group + 4] & 15) | six[group - 4] >> 6 << 4;
      lowest = six[group + 4] >> 4 | six[group] >> 6 << 4;
    }
    scale = half_to_float(read<uint16_t>(block)) * float(factor);
    minimum = half_to_float(read<uint16_t>(block + 2)) * float(lowest);
    low = block + 16 + between + group / 2 * 32;
    shift = int(group % 2) * 4;
  }
  // in steps of the block's halves
  int factor, lowest;
  float scale, minimum;
  const uint8_t* low;
  int shift;
};

}  // namespace paceline
