// Low-rank additions to a model's products: y += B (A x), by row of the batch.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace paceline {

// Products of a layer whose matrices multiply the same rows.
enum AdapterPart { kPartQkv, kPartOut, kPartGateUp, kPartDown, kParts, kNoPart = -1 };
// q, k, v, o, gate, up, down
constexpr int kAdapted = 7;

// Outputs [begin, begin + rows) of a product, of one matrix; gated halves lie in 16 of every 32, from `phase` on.
struct AdaptedRows {
  int64_t begin = 0, rows = 0, spread = 0, phase = 0;
};

// One product: its panels in the order of its parts, see Linear.
struct AdaptedProduct {
  int64_t columns = 0;
  // outputs of each part
  std::vector<int64_t> parts;
  // places of the matrices, from `first` on; empty where an adapter cannot add to this product
  std::vector<AdaptedRows> matrices;
  int first = 0;
};

// Ranks are padded, so that a shrink takes several at a time.
constexpr int64_t kRankUnit = 4;

// What one adapter adds to one product. Values are bfloat16, float32 or signed bytes, all of a layer's in one run of
// memory:
//   a  [rank / 4][columns / 32][4][32]         rows of the product's matrices one after another, four at a time, so
//                                             that a shrink reads one run of memory
//   b  for each panel [its rank][32 outputs]  what AdapterPanel names
// Of 32 values in bfloat16 the first 16 are the low halves of 16 words and the others the high halves: one load and
// two operations make floats of them. Bytes have a scale for each row of A and each column of B; as both belong to one
// rank, `scales` holds their product, and a byte costs no more than its load.
struct AdapterProduct {
  const uint8_t* a = nullptr;  // null: nothing
  int64_t rank = 0;
  const float* scales = nullptr;  // [rank]
  std::vector<AdapterPanel> panels;
  // first row and padded rank of each matrix; rank 0: it has none
  int64_t begin[3] = {}, ranks[3] = {};
};

class Adapter {
 public:
  // ranks and scales: [layers, kAdapted], rank 0 where the adapter has nothing; throws std::invalid_argument
  Adapter(const std::vector<AdaptedProduct>& shape, const int64_t* ranks, const float* scales, AdapterValues values);

  // a: [rank, columns], b: [rows, rank]; different matrices may be set from different threads
  void set(int64_t layer, int matrix, const float* a, const float* b);

  const AdapterProduct& product(int64_t layer, int part) const { return products_[size_t(layer * kParts + part)]; }
  // the most of any product
  int64_t rank() const { return rank_; }
  AdapterValues values() const { return values_; }
  size_t bytes() const { return memory_.size(); }
  int64_t layers() const { return int64_t(shape_.size()) / kParts; }

 private:
  int64_t value_bytes() const { return adapter_value_bytes(values_); }
  // lane `lane` of the 32 values that begin at `index`
  void put(uint8_t* to, int64_t index, int64_t lane, float value);
  void lay_out_panels(const AdaptedProduct& shape, AdapterProduct& product, int64_t& offset);

  AdapterValues values_;
  int64_t rank_ = 0;
  std::vector<AdaptedProduct> shape_;
  std::vector<AdapterProduct> products_;
  std::vector<int64_t> ranks_;
  std::vector<float> scales_;
  Memory memory_;
};

// A row's adapter, null for none, and the request's own factor.
struct AdapterUse {
  const Adapter* adapter = nullptr;
  float scale = 0;
};

}  // namespace paceline
