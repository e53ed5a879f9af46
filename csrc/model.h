// A decoder with its paged KV cache, run one whole step at a time.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "adapter.h"
#include "kernels.h"
#include "matrix.h"
#include "paceline_native.h"
#include "row_balance.h"
#include "pool.h"
#include "sample.h"

namespace paceline {

constexpr float kLog2e = 1.4426950408889634f;
// rows of activations that stay in the second-level cache while panels stream past
constexpr int64_t kRowBlock = 208;

constexpr int64_t kMaxExperts = 4096;
// Pairs of a row and an expert computed in one pass over the rows, which bounds the memory that their activations
// take. Each pass reads the matrices again, which is hidden behind the products of so many.
constexpr int64_t kPassPairs = 8192;
// attention begins at an even tile, see AttendArgs
constexpr int kWindowTiles = 2;

inline int64_t pad_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What a step spends its time on; see Model::seconds.
enum Section { kEmbed, kNorm, kQkv, kRope, kAttend, kEncode, kOut, kRoute, kGateUp, kDown, kHead, kSections };

// Matrices that multiply the same rows, whose outputs lie side by side: one, or one of each kind where what is
// multiplied together is stored in several.
struct Linear {
  std::vector<Matrix> parts;
  std::vector<float> bias;
  bool has_bias = false;

  int64_t columns() const { return parts[0].columns(); }
  int64_t panel_count() const {
    int64_t count = 0;
    for (const Matrix& part : parts) count += part.panel_count();
    return count;
  }
};

// One MLP of several, of which a row goes through some.
struct Expert {
  Linear gate_up, down;
};

struct Layer {
  // empty where the model has none; `sinks` are in powers of two
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm, attention_out_norm, mlp_out_norm, sinks;
  Linear qkv, out;
  // one MLP for all rows
  Linear gate_up, down;
  // or a router in float32 and what it chooses from; see experts.cpp
  Linear router;
  std::vector<Expert> experts;
  bool sliding = false;
  bool windowed = false;     // its keys and values are in window blocks
  int64_t cache_offset = 0;  // of what the first block has of it
  int rope = 0;  // its tables; -1: not rotated
};

// Up to kMaxRows (token, query head) pairs of one sequence and KV head; row f of the pair numbering
// is token f / group, head f % group.
struct AttendItem {
  int32_t sequence;
  int32_t kv_head;
  int64_t row;
  int32_t rows;
  int32_t key_begin;
  int32_t key_end;
  // where the first part's result of the first row goes, kMaxRows on for every further part; -1: parts are
  // merged as they come
  int64_t part;
};

// Pairs [begin, end) of a row and one of its experts, of one expert: what is multiplied by its matrices together.
struct ExpertRun {
  int32_t expert;
  int64_t begin;
  int64_t end;
};

struct MergeItem {
  int64_t part;  // the first one's
  int32_t parts;
  int32_t rows;
  int32_t sequence;
  int32_t kv_head;
  int64_t row;
};

struct AttendPlan {
  // every row's keys in one item, and what cut_long makes of them (split_kv.h)
  std::vector<AttendItem> whole, items;
  std::vector<MergeItem> merges;
  // rows of results that items leave; those of each member's own lie behind
  int64_t parts = 0;
};

class Model {
 public:
  // throws std::invalid_argument
  explicit Model(const PacelineConfig& config);

  // `expert`: of a layer that has them, for tensors of an MLP; else 0
  void load(PacelineTensor kind, int layer, int expert, Source type, const void* data, int64_t rows, int64_t columns);
  // Everything that loading makes of tensors, in an order that follows from the config alone: written as it lies in
  // memory, and read back into a model of the same config, it stands for loading.
  struct Piece {
    void* data;
    size_t bytes;
  };
  std::vector<Piece> pieces();
  // where adapters add to this model's products
  std::vector<AdaptedProduct> adapted_products() const;
  // says that all pieces were read back
  void restored();
  // cos and sin: [max_positions, head_dim / 2]
  void set_rope(int table, const float* cos, const float* sin);
  // throws std::invalid_argument naming a tensor that is missing
  void check_loaded() const;
  // the same; and threads of the caller's priority compute from here on
  void ready();
  // throws std::invalid_argument; then nothing has run
  void forward(const PacelineStep& step);
  // see paceline_native.h
  int64_t hand_over(const int64_t* wanted, void (*offer)(), double slice);
  void copy_blocks(const int64_t* from, const int64_t* to, int64_t count);

  // see paceline_native.h; throw std::invalid_argument
  void draw(const PacelineDraw& draw) { sampler_.draw(*kernels_, &team_, draw); }
  void logprobs(const PacelineLogprobs& logprobs) { sampler_.logprobs(*kernels_, &team_, logprobs); }

  // stand-ins for tests: one KV write and attention of the first layer alone; see paceline_native.h
  void attention_only(const PacelineStep& step, float* qkv, float* out);

  // the whole cache, for tests that poison it
  void* cache(int64_t* bytes) {
    *bytes = int64_t(cache_.size());
    return cache_.data();
  }
  int64_t block_bytes() const { return block_bytes_; }
  size_t weight_bytes() const { return arena_.size(); }
  const char* isa() const { return kernels_->name; }
  const std::array<double, kSections>& seconds() const { return seconds_; }
  void set_profile(bool on);

 private:
  void reserve_cache();
  void expect_shape(PacelineTensor kind, bool of_expert, int64_t rows, int64_t columns) const;
  // where `loaded_` has a tensor
  size_t place_of(PacelineTensor kind, int64_t layer, int64_t expert) const;
  bool has_tensor(int kind, const Layer& layer) const;
  struct Rows {
    int64_t count;
    int kind;  // -1: as suits the model's kind
  };
  Matrix make_matrix(int64_t rows, int64_t columns, int kind, bool table);
  void make_linear(Linear& linear, std::initializer_list<Rows> rows, int64_t columns, bool bias);
  void make_mlp(Linear& gate_up, Linear& down, int64_t width, int gate_up_kind, int down_kind);
  void pack(Linear& linear, Source type, const void* data, int64_t rows, int64_t offset, int64_t spread, int64_t phase);
  void pack(Matrix& matrix, Source type, const void* data, int64_t rows, int64_t offset, int64_t spread,
            int64_t phase);
  void prepare(const PacelineStep& step);
  void plan_attention(const PacelineStep& step, int window, AttendPlan& plan);
  void reserve(int64_t tokens, int64_t sampled);
  void reserve_experts(int64_t tokens);

  // inside Team::run, by every member
  void run_step(const PacelineStep& step, int member);
  void mark(int member, Section section);
  // whether the processors are to be offered to others now
  bool is_wanted() const;
  void pause(int member);
  struct Shape {
    Acts acts;
    int64_t bytes;   // of one encoded row
    int64_t scales;  // floats
  };
  // Rows that one member works on between two attentions, and where it keeps them in the products' form.
  struct Share {
    int64_t begin;  // among all rows
    int64_t rows;
    int64_t total;  // of the whole team
    bool alone;  // false: these are all rows, and the whole team works on them
    uint8_t* acts;
    float* scales;
  };
  Share share_of(int member, int64_t rows);
  // A product that adapters of the step's rows add to; null uses: no row has one.
  struct Adapted {
    const AdapterUse* uses;
    int64_t layer;
    int part;
  };
  // f(r) for every row r of a share, counted from its first
  template <class F>
  void each_row(int member, const Share& share, F&& f) {
    if (!share.alone) return team_.each(member, share.rows, row_grain(share.rows), f);
    for (int64_t r = 0; r < share.rows; ++r) f(r);
  }
  // rows dealt at a time: they take well under a microsecond each
  int64_t row_grain(int64_t rows) const {
    const int64_t grain = rows / (4 * team_.size());
    return grain < 1 ? 1 : grain > 16 ? 16 : grain;
  }
  Shape shape_of(const Linear& linear) const;
  // x: all rows; `chosen`: which of them the rows of the share are, null: the same
  void encode_rows(int member, const Share& share, const float* x, const int32_t* chosen, int64_t columns,
                   int64_t stride, const Linear& next, const Adapted& adapted);
  // what an adapter makes of rows of floats before the product that `adapted` names
  void shrink_run(const Adapted& adapted, int64_t row, int64_t count, const float* const* x, int64_t columns);
  // f(first, count) for rows of a share that have one adapter, at most kShrunkRows; one by one where no row has any
  template <class F>
  void each_run(int member, const Share& share, const Adapted& adapted, F&& f);
  // the same of all rows of a share, which the product takes as they are: float32, or bfloat16
  void shrink_rows(int member, const Share& share, const uint8_t* x, int64_t stride, bool bf16, const Adapted& adapted);
  void prepare_adapters(const PacelineStep& step);
  void find_runs(const std::vector<AdapterUse>& uses, std::vector<int64_t>& runs) const;
  // x: the share's first row; before(r) is called first of all for each row
  template <class F>
  void norm_rows(int member, const Share& share, const float* x, const std::vector<float>& weight, const Linear& next,
                 const Adapted& adapted, F&& before);
  // x, the share's rows, plus what half a layer gave, normed first where it has a norm for that
  void multiply_into(int member, const Share& share, const Linear& linear, const uint8_t* acts, int64_t acts_stride,
                     const std::vector<float>& norm, float* x);
  const int32_t* tables_of(const PacelineStep& step, const Layer& layer) const {
    return layer.windowed ? step.window_tables : step.tables;
  }
  int64_t stride_of(const Layer& layer) const { return layer.windowed ? window_block_bytes_ : block_bytes_; }
  // where a token's keys and values go in a layer: the first head's tile
  uint8_t* tile_of(const PacelineStep& step, int64_t token, int64_t layer_index);
  // asks for the lines that a row of the share will be written to
  void expect_kv(const Share& share, int64_t row, const PacelineStep& step, int64_t layer_index);
  // with its first part
  GemmArgs product_of(const Share& share, const Linear& linear) const;
  void multiply(int member, const Share& share, const Linear& linear, const uint8_t* acts, int64_t acts_stride,
                Epilogue epilogue, void* out, int64_t out_stride, bool out_bf16, bool adapted = false);
  void rope_and_store(int member, const Share& share, const PacelineStep& step, const Layer& layer, int64_t layer_index,
                      float* qkv);
  void attend(int member, const PacelineStep& step, const Layer& layer, bool last, float* out);
  int64_t widest() const {
    const int64_t attended = config_.heads * config_.head_dim, wide = hidden_pad_ > inner_pad_ ? hidden_pad_ : inner_pad_;
    return attended > wide ? attended : wide;
  }
  float* shrunk_rows() const { return reinterpret_cast<float*>(shrunk_.data()); }
  // a member's own, of the widest row; of kShrunkRows in a step with adapters
  float* scratch_of(int member) {
    return reinterpret_cast<float*>(rows_.data()) + member * int64_t(rows_.size() / 4 / size_t(team_.size()));
  }
  Epilogue gated() const {
    constexpr Epilogue kinds[] = {Epilogue::kSilu, Epilogue::kGelu, Epilogue::kClamped};
    return kinds[config_.activation];
  }
  // see experts.cpp: adds to the rows of x, all of them, what their experts give; by all members together
  void run_experts(int member, const Layer& layer, float* x, int64_t rows);
  void run_pass(int member, const Layer& layer, float* x, int64_t rows);
  void choose_experts(const float* scores, int64_t row);
  void sort_pairs(int64_t rows);
  void multiply_pairs(int member, const Layer& layer, Linear Expert::*which, GemmArgs args);

  PacelineConfig config_;
  const Kernels* kernels_;
  Weights weights_;
  Kv kv_;
  Team team_;
  Paces paces_{team_.size()};
  Arena arena_;
  std::vector<Layer> layers_;
  Matrix embedding_;
  // its parts are one; none where only hidden states are wanted
  Linear head_;
  std::vector<float> final_norm_;
  std::array<std::vector<float>, 2> cos_, sin_;
  std::vector<uint8_t> loaded_;

  // block after block, of each all layers (but those with window blocks, which lie behind): the pages that are
  // touched are those of the blocks in use
  Memory cache_;
  int64_t block_bytes_ = 0;
  int64_t window_block_bytes_ = 0;
  int64_t layer_bytes_ = 0;  // of one layer of a block
  int64_t head_bytes_ = 0;
  int64_t tile_bytes_ = 0;

  // inner_pad_: 0 where all layers have experts
  int64_t hidden_pad_, inner_pad_, group_, qkv_rows_;
  // of one row of acts_buffer_ and scales_, at most
  int64_t act_bytes_, act_scales_;
  // of the step that runs
  std::vector<int32_t> sequence_of_;
  std::vector<int32_t> sampled_before_;
  // by token, and by sampled row; empty where no row of the step has an adapter
  std::vector<AdapterUse> token_adapters_, sampled_adapters_;
  // first rows of the runs that `each_run` deals out, and the number of rows
  std::vector<int64_t> token_runs_, sampled_runs_;
  // by row of the product at hand, and what adapters made of the rows, see Shrunk
  std::vector<RowAdapter> row_adapters_;
  Memory shrunk_;
  // for each member and row, see GemmArgs
  Memory added_;
  int64_t shrunk_stride_ = 0;
  AttendPlan plan_, sliding_plan_;
  Memory x_, xr_, acts_buffer_, scales_, qkv_, queries_, query_scales_, attended_, given_, inner_, parts_, rows_;
  // of a pass through a layer's experts: normed rows and what the router says of them; in the order of pairs what
  // is multiplied, its scales and both products' outputs
  Memory normed_, scores_, pair_acts_, pair_scales_, pair_inner_, pair_out_;
  // the experts of each row, its favourite first, their weights, and the pairs that they are in
  // [rows, experts_per_token]
  std::vector<int32_t> chosen_;
  std::vector<float> shares_;
  std::vector<int64_t> pair_of_;
  // the row of each pair, and where an expert's pairs begin
  std::vector<int32_t> row_of_;
  std::vector<int64_t> starts_;
  std::vector<ExpertRun> runs_;
  int64_t run_count_ = 0;
  Sampler sampler_;
  // [sampled, vocab] of steps that want the likeliest tokens alone
  Memory logits_;
  // as hand_over was told; when the processors were offered last, and whether they are in this layer
  const int64_t* wanted_ = nullptr;
  void (*offer_)() = nullptr;
  double slice_ = 0, offered_ = 0;
  bool pausing_ = false;
  bool profile_ = false;
  double last_mark_ = 0;
  std::array<double, kSections> seconds_{};
};

}  // namespace paceline
