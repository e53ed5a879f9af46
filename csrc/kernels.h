// What every instruction-set variant of the kernels offers, and the layouts they share.
//
// Matrices are packed in panels of 32 output rows. A panel is a run of "units": a unit holds one
// 32-bit word for each of the 32 rows (1 float32, 2 bfloat16 or 4 int8 along the input dimension),
// so a broadcast 32-bit word of the activations times a 64-byte load gives 16 outputs without a
// horizontal sum.
//
// int8 products are of rotated rows: in every whole group of 64 columns both the weights, once, and the
// activations, whenever they are encoded, are multiplied by the same orthonormal Hadamard matrix.
// Products stay what they were, and a large value among small ones, which would set the step of its
// whole group, is spread over all 64 (Ashkboos et al., QuaRot, 2024, there for 4 bits and whole rows).
// Columns that fill no group are left as they are.
//
// The KV cache holds, per layer, block and KV head, `block_size / 16` tiles of 16 tokens:
//   K: [head_dim / g][16 tokens][g]    V: [16 / g token groups][head_dim][g]
// with g = 1 for float32, 2 for bfloat16, 4 for int8: both products of attention are then the same
// broadcast products. An int8 cache stores bytes, keys as value / scale + 128 and values as they are,
// and behind K and V of a tile come 16 float scales of the keys and 16 of the values.
#pragma once
#include <cstdint>

namespace paceline {

constexpr int kPanel = 32;
constexpr int kTile = 16;
constexpr int kGroup = 32;           // columns that share a scale and a minimum in 4-bit weights
constexpr int kActGroup = 64;        // columns rotated together, and a scale of int8 activations
// 4-bit weights are (scale * (nibble - 8) + minimum) times a power of two, one for each output (Panels::scale), of
// which scales and minimums are whole numbers. So a product with a group's 32 columns is scaled in whole numbers,
// and its minimum comes with it: in 16 bits lie the sum of nibbles - 8 times activations, at most 32 * 8 * 127, and
// beside it the sum of activations.
constexpr int kQ4GroupBytes = 640;  // 512 of nibbles, 32 pairs of a scale and a minimum in 16 bits
constexpr int kQ40GroupBytes = 576;  // 512 of nibbles, 32 scales in 16 bits; no minimum
// Blocks of 256 columns of a panel in the bits that GGUF's K kinds have (4.5, 5.5 and 6.5625 a weight):
//   Q4_K, Q5_K: 32 half scales and 32 half minimums of the block
//               for each of 8 groups the scales and minimums of 6 bits: 32 bytes of a scale and a minimum's lower 2
//               bits, 16 bytes of minimums' upper 4 bits, those of rows 0 to 15 below those of rows 16 to 31
//   Q6_K:       32 half scales of the block, then 32 signed bytes of scales for every 16 columns
//   all:        nibbles of 8 groups as in Q4; then what a value has beyond them:
//   Q5_K: for each group 128 bytes, bit u of a byte belongs to unit u (4 columns) of the group
//   Q6_K: for each group 2 x 128 bytes; bits 0-1, 2-3, 4-5, 6-7 of half h belong to units 2h, 2h + 4, 2h + 1, 2h + 5
constexpr int kBlock = 256;
constexpr int kGroupsOfBlock = kBlock / kGroup;
constexpr int kNibbleBytes = 512;  // of a group
constexpr int kSixBytes = 48;      // scales and minimums of a group of Q4_K or Q5_K
constexpr int kQ4KScales = 128, kQ4KNibbles = kQ4KScales + kGroupsOfBlock * kSixBytes;
constexpr int kQ4KBlockBytes = kQ4KNibbles + kGroupsOfBlock * kNibbleBytes;
constexpr int kQ5KBlockBytes = kQ4KBlockBytes + kGroupsOfBlock * 128;
constexpr int kQ6KScales = 64, kQ6KNibbles = kQ6KScales + kBlock / 16 * kPanel;
constexpr int kQ6KHigh = kQ6KNibbles + kGroupsOfBlock * kNibbleBytes;
constexpr int kQ6KBlockBytes = kQ6KHigh + kGroupsOfBlock * 256;
// Kinds whose nibbles stand for one of 16 numbers, and lie as in Q4 (tables.h; 4.5, 4.25 and 4.25 bits a weight):
//   IQ4_NL: groups of 32 columns: nibbles, 32 half scales
//   MXFP4:  groups of 32 columns: nibbles, 32 bytes: a scale is 2 to the power of one less 128
//   IQ4_XS: blocks of 256 columns: 32 half scales of the block; for each two groups the scales of 6 bits, 32 more than
//           meant: 16 bytes each of their lower 4 bits, those of rows 0 to 15 below those of rows 16 to 31, and 16
//           bytes of the upper 2: bits 0-1 rows 0 to 15, 2-3 the others, and 4-7 those of the second group; nibbles
constexpr int kIQ4NLGroupBytes = kNibbleBytes + 64;
constexpr int kMXFP4GroupBytes = kNibbleBytes + 32;
constexpr int kIQ4XSScales = 64, kIQ4XSPairBytes = 48;
constexpr int kIQ4XSNibbles = kIQ4XSScales + kGroupsOfBlock / 2 * kIQ4XSPairBytes;
constexpr int kIQ4XSBlockBytes = kIQ4XSNibbles + kGroupsOfBlock * kNibbleBytes;
constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kMaxRows = 12;        // attention rows computed together, at most
constexpr int kChunkTiles = 8;      // key tiles per softmax update
// Keys whose part of a row's attention is taken by itself, from a multiple of this on. Parts are merged in order,
// whoever computes them and however many rows and threads there are, so that a row's result follows from its own
// keys alone. A multiple of a chunk: shorter ones merge more often, longer ones cannot be dealt to threads as evenly
constexpr int kPartKeys = 256;
constexpr int kMaxHeadDim = 256;
constexpr int64_t kWeighChunk = 1024;  // logits that `weigh` sums up, and that `tops` deals to 16 lanes

// kQ4 has a scale and a minimum for each group, kQ40 and those behind it what GGUF's blocks have
enum class Weights : int {
  kF32 = 0, kBF16 = 1, kI8 = 2, kQ4 = 3, kQ40 = 4, kQ4K = 5, kQ5K = 6, kQ6K = 7, kIQ4NL = 8, kIQ4XS = 9, kMXFP4 = 10
};
constexpr int kWeightKinds = 11;
// rows of activations
enum class Acts : int { kF32 = 0, kBF16 = 1, kI8 = 2, kI8ForQ4 = 3 };
enum class Kv : int { kF32 = 0, kBF16 = 1, kI8 = 2 };
// from kSilu on a gate's function times the other half; kClamped: x sigmoid(1.702 x) of a gate of at most `limit`,
// times 1 and an up within it
enum class Epilogue : int { kStore = 0, kAdd = 1, kSilu = 2, kGelu = 3, kClamped = 4 };

struct Panels {
  const uint8_t* data = nullptr;
  int64_t panel_bytes = 0;
  int64_t rows = 0;     // outputs, before padding to whole panels
  int64_t columns = 0;  // inputs, before padding to whole units
  int64_t units = 0;
  // kI8: one an output; weights are stored as rotated value / scale + 128. kQ4 and kQ40: the power of two of each
  const float* scale = nullptr;
};

// How an adapter's values are kept, see adapter.h; the numbers are those of paceline_native.h.
enum class AdapterValues { kBF16, kF32, kS8 };

constexpr int64_t adapter_value_bytes(AdapterValues values) {
  return values == AdapterValues::kF32 ? 4 : values == AdapterValues::kBF16 ? 2 : 1;
}

// What an adapter adds to a panel of 32 outputs, by halves of 16: the sum over k of sums[first[half] + k] times
// b[k][16 half ... 16 half + 15], see adapter.h.
struct AdapterPanel {
  const uint8_t* b = nullptr;
  int32_t rank = 0;
  int32_t first[2] = {};
};

// A row's adapter in one product; null panels: none.
struct RowAdapter {
  const AdapterPanel* panels = nullptr;
  AdapterValues values = AdapterValues::kBF16;
};

// What adapters made of rows: sums[k * stride + row]. Rows of a rank lie together, as they are read together.
struct Shrunk {
  float* sums = nullptr;
  int64_t stride = 0;
};

// Sums of a row for a panel of outputs.
using Sums = float[kPanel];

struct GemmArgs {
  const uint8_t* a = nullptr;
  int64_t a_stride = 0;
  // per row: kI8 a scale for every 64 columns, then 128 times the row's sum; kI8ForQ4 a scale for every
  // 32 columns, then for each of them scale * sum, then as int32 -32 times the sum of bytes for every 16, then what
  // sums of nibbles begin with for every 32, see encode.h
  const float* a_scale = nullptr;
  Panels w;
  const float* bias = nullptr;
  Epilogue epilogue = Epilogue::kStore;
  // gated ones store columns [16p, 16p + 16) of panel p; rows hold whole multiples of 16
  void* out = nullptr;
  int64_t out_stride = 0;  // elements
  bool out_bf16 = false;   // gated ones only
  float limit = 0;         // kClamped
  // by row, null: no row has one; the panels of the product that come before those of `w`
  const RowAdapter* adapters = nullptr;
  int64_t first_panel = 0;
  Shrunk shrunk;
  // by row, what `expand` found for the panel at hand: only for rows that have an adapter
  Sums* added = nullptr;
};

// Most rows of a ShrinkArgs.
constexpr int kShrunkRows = 12;

// Sums of each row x: factor * scales[k] * (row k of a) x, for a multiple of kRankUnit rows of a, laid out as adapter.h
// says. What becomes of a row follows from that row alone.
struct ShrinkArgs {
  const float* x[kShrunkRows] = {};
  int count = 0;
  int64_t columns = 0;
  const uint8_t* a = nullptr;
  AdapterValues values = AdapterValues::kBF16;
  int64_t rank = 0;
  const float* scales = nullptr;
  float factor = 0;
  // from its first row on
  Shrunk shrunk;
};

struct AttendArgs {
  const uint8_t* q = nullptr;     // rows [head_dim], see encode_query
  int64_t q_stride = 0;           // bytes
  const float* q_scale = nullptr; // kI8: one scale a row
  const uint8_t* layer = nullptr; // first block of the layer
  int64_t block_bytes = 0;
  int64_t head_bytes = 0;         // of one KV head in one block
  int kv_head = 0;
  int head_dim = 0;
  int tiles_per_block = 0;
  const int32_t* table = nullptr;
  int rows = 0;
  // keys [first[r], limit[r]) are visible to row r
  const int32_t* first = nullptr;
  const int32_t* limit = nullptr;
  float* out[kMaxRows] = {};
  // outputs are left unnormalised and followed by their maximum score and sum, for merge_part
  bool split = false;
  // in the units of scores, which become softcap * tanh(score / softcap); 0: they stay
  float softcap = 0;
  // keys considered at all: whole tiles [key_begin, key_end), from an even one on
  int key_begin = 0;
  int key_end = 0;
  // what comes after, to be fetched ahead; next_end 0: nothing
  const int32_t* next_table = nullptr;
  int next_head = 0;
  int next_begin = 0;
  int next_end = 0;
};

// A logit's weight is 2 to the power (x - best) * (high + low), which is 1 for the best
struct Exponent {
  float best = 0;
  float high = 0;
  float low = 0;  // what float32 lost of the factor
};

struct Kernels {
  const char* name;
  int attend_rows;  // most rows `attend` takes, <= kMaxRows
  // products of bytes share 16 bits, which the steps of activations see to
  bool narrow_sums;
  // bytes of a query's value beside a kind of cache, see encode_query
  int query_bytes[3];
  // what a kind of weights multiplies
  Acts acts[kWeightKinds];
  void (*gemm[kWeightKinds])(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel);
  // y = x / rms(x) * w, n floats; w null: y = x
  void (*rms_norm)(const float* x, const float* w, int64_t n, float eps, float* y);
  // one row of n floats into its packed activation form, zero-padded to `padded` elements
  void (*encode)(const float* x, int64_t n, int64_t padded, Acts kind, void* y, float* scale);
  // rotate one head in place; cos and sin [head_dim / 2]
  void (*rope)(float* x, const float* cos, const float* sin, int head_dim);
  // one query head, times `factor`, into the form `attend` takes
  void (*encode_query)(const float* x, int head_dim, float factor, Kv kind, void* y, float* scale);
  // ask for the lines that store_kv will write
  void (*expect_kv)(int head_dim, int slot, Kv kind, const uint8_t* tile);
  // one key and one value head into token `slot` of a tile
  void (*store_kv)(const float* k, const float* v, int head_dim, int slot, Kv kind, uint8_t* tile);
  void (*attend[3])(const AttendArgs& args);
  void (*shrink)(const ShrinkArgs& args);
  // what adapters add to a panel, for the product that follows
  void (*expand)(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel);
  // the first of the largest of n floats, n >= 1; -1 if one of them is infinite or NaN
  int32_t (*likeliest)(const float* x, int64_t n);
  // n floats become cap * tanh(x / cap), with a relative error below 5e-7; those that are not finite become NaN
  void (*cap_logits)(float* x, int64_t n, float cap);
  // what `attend` left split: adds rows, `stride` floats apart, to others, and the outputs of one at the end
  void (*merge_part)(const float* part, int rows, int64_t stride, int head_dim, float* into);
  void (*finish_parts)(const float* from, int head_dim, float* out);

  // Sampling, see sample.h. Logits may be minus infinity.
  // the first of the largest of n floats, -1 if there is nothing above minus infinity
  int32_t (*first_largest)(const float* x, int64_t n);
  // n floats, minus infinity where the mask is 1 and not 0
  void (*masked)(const float* x, const uint8_t* mask, int64_t n, float* out);
  // Weights of n logits. Those below `least` or 2^-126 count as 0. w: n floats, and zeros up to a multiple
  // of 16; may be null. sums: one for each kWeighChunk of them; may be null
  void (*weigh)(const float* x, int64_t n, const Exponent& e, float least, float* w, float* sums);
  // the largest of every 16th logit of a chunk, 16 a chunk: every logit is below or at one of them
  void (*tops)(const float* x, int64_t n, float* out);
  // how many of n floats are at least t, and their sum
  void (*at_least)(const float* x, int64_t n, float t, double* sum, int64_t* count);
  // places of the floats in [low, high), ascending; returns how many, or limit + 1 if there are more
  int64_t (*collect)(const float* x, int64_t n, float low, float high, int64_t limit, int32_t* places);

  // Packing of int8 weights.
  // every whole group of 64 of n floats times the Hadamard matrix of order 64 over 8, in place; returns the largest
  // of all n without its sign, NaN left out
  float (*rotate)(float* x, int64_t n);
  // n floats as unsigned bytes with the zero point 128: round(x * factor) + 128
  void (*quantize_u8)(const float* x, int64_t n, float factor, uint8_t* y);
};

// floats of a row's scales beside 4-bit weights and the K kinds, see GemmArgs: so many for each group
constexpr int kActScales = 5;
inline int64_t q4_scales(int64_t columns) { return kActScales * (columns / kGroup); }

// bytes of one tile: K, V and, for int8, their scales
inline int64_t tile_bytes(Kv kind, int head_dim) {
  switch (kind) {
    case Kv::kF32: return int64_t(head_dim) * kTile * 8;
    case Kv::kBF16: return int64_t(head_dim) * kTile * 4;
    default: return int64_t(head_dim) * kTile * 2 + 2 * kTile * 4;
  }
}

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512bw();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();

}  // namespace paceline
