#include "adapter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "convert.h"

namespace paceline {
namespace {

int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Where output `row` of a matrix lies among a product's.
int64_t place_of(const AdaptedRows& rows, int64_t row) {
  return rows.spread ? row / 16 * rows.spread + rows.phase + row % 16 : rows.begin + row;
}

// The panels that hold a product's outputs: where each begins, and how many outputs it has.
template <class F>
void each_panel(const AdaptedProduct& shape, F&& f) {
  int64_t first = 0;
  for (int64_t rows : shape.parts) {
    for (int64_t row = 0; row < rows; row += kPanel) f(first + row, rows - row < kPanel ? rows - row : int64_t(kPanel));
    first += rows;
  }
}

// What the values of a rank are divided by so that they fit signed bytes.
float byte_scale(const float* values, int64_t count, int64_t stride) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(values[i * stride]));
  return most / 127;
}

}  // namespace

Adapter::Adapter(const std::vector<AdaptedProduct>& shape, const int64_t* ranks, const float* scales,
                 AdapterValues values)
    : values_(values), shape_(shape), products_(shape.size()), ranks_(ranks, ranks + shape.size() / kParts * kAdapted) {
  std::vector<int64_t> scale_begins(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t layer = int64_t(i) / kParts;
    AdapterProduct& product = products_[i];
    scale_begins[i] = int64_t(scales_.size());
    for (size_t m = 0; m < shape[i].matrices.size(); ++m) {
      const int64_t at = layer * kAdapted + shape[i].first + int64_t(m), rank = ranks[at];
      if (rank < 0 || rank > 4096) throw std::invalid_argument("rank " + std::to_string(rank) + " is not in 0 to 4096");
      product.begin[m] = product.rank;
      product.ranks[m] = padded(rank, kRankUnit);
      product.rank += product.ranks[m];
      scales_.insert(scales_.end(), size_t(product.ranks[m]), scales[at]);
    }
    rank_ = product.rank > rank_ ? product.rank : rank_;
  }
  for (size_t i = 0; i < shape.size(); ++i)
    for (int64_t m = 0; m < kAdapted; ++m) {
      const int64_t first = shape[i].first, count = int64_t(shape[i].matrices.size());
      const bool of_part = int(i % kParts) == (m < 3 ? kPartQkv : m == 3 ? kPartOut : m < 6 ? kPartGateUp : kPartDown);
      if (of_part && (m < first || m >= first + count) && ranks[int64_t(i) / kParts * kAdapted + m] > 0)
        throw std::invalid_argument("layer " + std::to_string(i / kParts) + " has no matrix " + std::to_string(m) +
                                    " that an adapter adds to");
    }
  // offsets first, addresses once the memory is there
  int64_t bytes = 0;
  for (size_t i = 0; i < shape.size(); ++i) {
    AdapterProduct& product = products_[i];
    if (!product.rank) continue;
    product.a = reinterpret_cast<const uint8_t*>(bytes);
    bytes += padded(product.rank * padded(shape[i].columns, kPanel) * value_bytes(), 64);
    lay_out_panels(shape[i], product, bytes);
  }
  memory_.reserve(size_t(bytes > 0 ? bytes : 64));
  const uint8_t* base = memory_.data();
  for (size_t i = 0; i < shape.size(); ++i) {
    AdapterProduct& product = products_[i];
    if (!product.rank) continue;
    product.a = base + reinterpret_cast<intptr_t>(product.a);
    product.scales = scales_.data() + scale_begins[i];
    for (AdapterPanel& panel : product.panels) panel.b = base + reinterpret_cast<intptr_t>(panel.b);
  }
}

// Half a panel is usually of one matrix, and has that one's rank alone. Where a half is of several, or halves
// differ in rank, both take the ranks of all, and zeros stand for those that do not belong.
void Adapter::lay_out_panels(const AdaptedProduct& shape, AdapterProduct& product, int64_t& offset) {
  each_panel(shape, [&](int64_t begin, int64_t count) {
    int64_t low = product.rank, high = 0, of_half[2] = {-1, -1};
    bool mixed = false;
    for (size_t m = 0; m < shape.matrices.size(); ++m) {
      if (!product.ranks[m]) continue;
      const AdaptedRows& rows = shape.matrices[m];
      for (int half = 0; half < 2; ++half) {
        const int64_t first = begin + 16 * half, last = first + 16 < begin + count ? first + 16 : begin + count;
        const int64_t end = rows.begin + rows.rows;
        const bool here = rows.spread ? rows.phase == 16 * half : first < last && first < end && last > rows.begin;
        if (!here) continue;
        mixed = mixed || of_half[half] >= 0;
        of_half[half] = int64_t(m);
        low = product.begin[m] < low ? product.begin[m] : low;
        high = product.begin[m] + product.ranks[m] > high ? product.begin[m] + product.ranks[m] : high;
      }
    }
    AdapterPanel panel;
    if (high > low) {
      for (int half = 0; half < 2; ++half)
        if (of_half[half] < 0) of_half[half] = of_half[1 - half];
      mixed = mixed || product.ranks[of_half[0]] != product.ranks[of_half[1]];
      panel.rank = int32_t(mixed ? high - low : product.ranks[of_half[0]]);
      for (int half = 0; half < 2; ++half) panel.first[half] = int32_t(mixed ? low : product.begin[of_half[half]]);
      panel.b = reinterpret_cast<const uint8_t*>(offset);
      offset += panel.rank * kPanel * value_bytes();
    }
    product.panels.push_back(panel);
  });
}

void Adapter::put(uint8_t* to, int64_t index, int64_t lane, float value) {
  if (values_ == AdapterValues::kF32) {
    memcpy(to + (index + lane) * 4, &value, 4);
  } else if (values_ == AdapterValues::kS8) {
    to[index + lane] = uint8_t(int8_t(lrintf(value)));
  } else {
    const uint16_t half = float_to_bf16(value);
    memcpy(to + (index + lane % 16 * 2 + lane / 16) * 2, &half, 2);
  }
}

void Adapter::set(int64_t layer, int matrix, const float* a, const float* b) {
  if (layer < 0 || layer >= layers() || matrix < 0 || matrix >= kAdapted)
    throw std::invalid_argument("an adapter has no matrix " + std::to_string(matrix) + " of layer " + std::to_string(layer));
  const int part = matrix < 3 ? kPartQkv : matrix == 3 ? kPartOut : matrix < 6 ? kPartGateUp : kPartDown;
  const AdaptedProduct& shape = shape_[size_t(layer * kParts + part)];
  AdapterProduct& product = products_[size_t(layer * kParts + part)];
  const int m = matrix - shape.first;
  const int64_t rank = ranks_[size_t(layer * kAdapted + matrix)], columns = shape.columns, stride = padded(columns, kPanel);
  if (!rank) throw std::invalid_argument("matrix " + std::to_string(matrix) + " was given with rank 0");
  uint8_t* to = const_cast<uint8_t*>(product.a);
  const AdaptedRows& rows = shape.matrices[size_t(m)];
  // by rank: what the values of A and of B are multiplied by
  std::vector<float> of_a(size_t(rank), 1.0f), of_b(size_t(rank), 1.0f);
  for (int64_t k = 0; k < rank && values_ == AdapterValues::kS8; ++k) {
    const float s = byte_scale(a + k * columns, columns, 1), t = byte_scale(b + k, rows.rows, rank);
    scales_[size_t(product.scales - scales_.data() + product.begin[m] + k)] *= s * t;
    of_a[size_t(k)] = s > 0 ? 1 / s : 0;
    of_b[size_t(k)] = t > 0 ? 1 / t : 0;
  }
  for (int64_t k = 0; k < rank; ++k) {
    const int64_t row = product.begin[m] + k, first = row / kRankUnit * kRankUnit * stride + row % kRankUnit * kPanel;
    for (int64_t i = 0; i < columns; ++i) put(to, first + i / kPanel * kPanel * kRankUnit, i % kPanel, a[k * columns + i] * of_a[size_t(k)]);
  }
  // by panels, since parts end in panels that are not whole
  size_t number = 0;
  std::vector<int64_t> begins, counts;
  each_panel(shape, [&](int64_t begin, int64_t count) {
    begins.push_back(begin);
    counts.push_back(count);
  });
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t place = place_of(rows, r);
    if (place < begins[number]) number = 0;
    while (place >= begins[number] + counts[number]) ++number;
    const AdapterPanel& panel = product.panels[number];
    const int64_t lane = place - begins[number];
    // 0 where the half has ranks of its own
    const int64_t offset = product.begin[m] - panel.first[lane / 16];
    for (int64_t k = 0; k < rank; ++k)
      put(const_cast<uint8_t*>(panel.b), (offset + k) * kPanel, lane, b[r * rank + k] * of_b[size_t(k)]);
  }
}

}  // namespace paceline
