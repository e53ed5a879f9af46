// Building a model: shapes, packing, and what must be there before the first step.
#include <utility>
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "features.h"
#include "model.h"

namespace paceline {
namespace {

const char* const kNames[PL_TENSORS] = {
    "embed_tokens", "norm",      "lm_head",   "input_layernorm", "post_attention_layernorm", "q_norm",
    "k_norm",       "q_proj",    "k_proj",    "v_proj",          "o_proj",                   "gate_proj",
    "up_proj",      "down_proj", "q_proj.bias", "k_proj.bias",   "v_proj.bias",              "o_proj.bias",
    "gate_proj.bias", "up_proj.bias", "down_proj.bias", "attention_output_norm", "mlp_output_norm",
    "router",       "router.bias", "sinks"};

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

bool of_mlp(PacelineTensor kind) {
  return (kind >= PL_GATE && kind <= PL_DOWN) || (kind >= PL_GATE_BIAS && kind <= PL_DOWN_BIAS);
}

void require(bool ok, const std::string& message) {
  if (!ok) refuse(message);
}

int checked_threads(int threads) {
  require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024, got " + std::to_string(threads));
  return threads;
}

}  // namespace

Model::Model(const PacelineConfig& config)
    : config_(config),
      kernels_(choose_kernels(config.isa)),
      weights_(Weights(config.weights)),
      kv_(Kv(config.kv)),
      team_(checked_threads(config.threads)) {
  const PacelineConfig& c = config_;
  require(c.layers > 0 && c.hidden > 0 && c.heads > 0 && c.kv_heads > 0 && c.inner > 0 && c.vocab > 0 &&
              c.max_positions > 0,
          "every dimension must be positive");
  require(c.heads % c.kv_heads == 0, "heads must be a multiple of kv_heads");
  require(c.head_dim % 16 == 0 && c.head_dim > 0 && c.head_dim <= kMaxHeadDim,
          "head_dim " + std::to_string(c.head_dim) + " is not a multiple of 16 up to " + std::to_string(kMaxHeadDim));
  require(c.block_size > 0 && c.block_size % kTile == 0,
          "block_size " + std::to_string(c.block_size) + " is not a multiple of " + std::to_string(kTile));
  require(c.num_blocks > 0, "num_blocks must be positive");
  require(c.weights >= 0 && c.weights <= 3, "unknown weight kind " + std::to_string(c.weights));
  require(c.kv >= 0 && c.kv <= 2, "unknown kv kind " + std::to_string(c.kv));
  require(c.activation >= 0 && c.activation <= 2, "unknown activation " + std::to_string(c.activation));
  require(c.experts >= 0 && c.experts <= kMaxExperts,
          std::to_string(c.experts) + " experts, must be 0 to " + std::to_string(kMaxExperts));
  require(c.experts == 0 || (c.experts_per_token > 0 && c.experts_per_token <= c.experts && c.expert_inner > 0),
          std::to_string(c.experts_per_token) + " of " + std::to_string(c.experts) + " experts of width " +
              std::to_string(c.expert_inner) + " for each token");

  group_ = c.heads / c.kv_heads;
  hidden_pad_ = pad_to(c.hidden, 16);
  inner_pad_ = 0;
  qkv_rows_ = (c.heads + 2 * c.kv_heads) * c.head_dim;
  tile_bytes_ = tile_bytes(kv_, int(c.head_dim));
  head_bytes_ = tile_bytes_ * (c.block_size / kTile);
  layer_bytes_ = head_bytes_ * c.kv_heads;
  require(c.num_window_blocks >= 0, "num_window_blocks must not be negative");
  layers_.resize(size_t(c.layers));
  int64_t windowed = 0;
  for (int64_t i = 0; i < c.layers; ++i) {
    Layer& layer = layers_[size_t(i)];
    layer.sliding = c.sliding_window > 0 && c.sliding && c.sliding[i];
    layer.windowed = layer.sliding && c.num_window_blocks > 0;
    layer.cache_offset = layer_bytes_ * (layer.windowed ? windowed : i - windowed);
    windowed += layer.windowed;
  }
  block_bytes_ = layer_bytes_ * (c.layers - windowed);
  window_block_bytes_ = layer_bytes_ * windowed;
  reserve_cache();
  for (Layer& layer : layers_)
    if (layer.windowed) layer.cache_offset += block_bytes_ * c.num_blocks;
  for (int64_t i = 0; i < c.layers; ++i) {
    Layer& layer = layers_[size_t(i)];
    auto kind = [&](int what) { return c.kinds ? int(c.kinds[i * PL_KINDS + what]) : -1; };
    const int64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
    make_linear(layer.qkv, {{queries, kind(PL_KIND_Q)}, {keys, kind(PL_KIND_K)}, {keys, kind(PL_KIND_V)}}, c.hidden,
                c.qkv_bias);
    make_linear(layer.out, {{c.hidden, kind(PL_KIND_O)}}, queries, c.o_bias);
    if (c.experts > 0 && !(c.dense && c.dense[i])) {
      // rounded, it would choose other experts
      make_linear(layer.router, {{c.experts, int(Weights::kF32)}}, c.hidden, c.router_bias);
      layer.experts.resize(size_t(c.experts));
      for (Expert& expert : layer.experts)
        make_mlp(expert.gate_up, expert.down, c.expert_inner, kind(PL_KIND_GATE_UP), kind(PL_KIND_DOWN));
    } else {
      inner_pad_ = pad_to(c.inner, 16);
      make_mlp(layer.gate_up, layer.down, c.inner, kind(PL_KIND_GATE_UP), kind(PL_KIND_DOWN));
    }
    if (c.sinks) layer.sinks.resize(size_t(c.heads));
    if (c.norms & 1) {
      layer.attention_norm.resize(size_t(c.hidden));
      layer.mlp_norm.resize(size_t(c.hidden));
    }
    if (c.norms & 2) {
      layer.attention_out_norm.resize(size_t(c.hidden));
      layer.mlp_out_norm.resize(size_t(c.hidden));
    }
    if (c.qk_norm) {
      layer.q_norm.resize(size_t(c.head_dim * (c.qk_norm_whole ? c.heads : 1)));
      layer.k_norm.resize(size_t(c.head_dim * (c.qk_norm_whole ? c.kv_heads : 1)));
    }
    layer.rope = c.ropes ? int(c.ropes[i]) - 1 : 0;
    require(layer.rope < int(cos_.size()), "there are two rotary tables");
  }
  config_.sliding = nullptr;
  config_.ropes = nullptr;
  config_.dense = nullptr;
  const uint8_t* tables = c.kinds ? c.kinds + c.layers * PL_KINDS : nullptr;
  if (!c.headless) head_.parts.push_back(make_matrix(c.vocab, c.hidden, tables ? tables[0] : -1, true));
  if (!c.tied || c.headless) embedding_ = make_matrix(c.vocab, c.hidden, tables ? tables[1] : -1, true);
  config_.kinds = nullptr;
  config_.isa = nullptr;
  final_norm_.resize(size_t(c.hidden));
  loaded_.assign(size_t(c.layers * (1 + c.experts) * PL_TENSORS), 0);
}

void Model::reserve_cache() {
  std::string what = std::to_string(config_.num_blocks) + " KV blocks of " + std::to_string(block_bytes_) + " bytes each";
  if (window_block_bytes_)
    what += " and " + std::to_string(config_.num_window_blocks) + " of " + std::to_string(window_block_bytes_);
  // more than processors address, and products that no integer holds
  const int64_t most = int64_t(1) << 47;
  require((!block_bytes_ || config_.num_blocks <= most / block_bytes_) &&
              (!window_block_bytes_ || config_.num_window_blocks <= most / window_block_bytes_),
          what + " are more than memory can be");
  try {
    cache_.reserve(size_t(block_bytes_ * config_.num_blocks + window_block_bytes_ * config_.num_window_blocks));
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("no memory for " + what);
  }
}

Matrix Model::make_matrix(int64_t rows, int64_t columns, int kind, bool table) {
  // tables and what has no whole groups are bytes beside 4-bit weights
  const bool bytes = weights_ == Weights::kQ4 && (table || columns % kGroup != 0);
  return Matrix(kind >= 0 ? Weights(kind) : bytes ? Weights::kI8 : weights_, rows, columns, arena_);
}

void Model::make_linear(Linear& linear, std::initializer_list<Rows> rows, int64_t columns, bool bias) {
  int64_t total = 0;
  for (const Rows *own = rows.begin(), *end = rows.end(); own != end;) {
    int64_t count = 0;
    const int kind = own->kind;
    for (; own != end && own->kind == kind; ++own) count += own->count;
    linear.parts.push_back(make_matrix(count, columns, kind, false));
    require(kernels_->acts[int(linear.parts.back().kind())] == kernels_->acts[int(linear.parts[0].kind())],
            "matrices that multiply the same rows need them in one form");
    total += count;
  }
  linear.has_bias = bias;
  if (bias) linear.bias.assign(size_t(pad_to(total, kPanel)), 0.0f);
}

void Model::make_mlp(Linear& gate_up, Linear& down, int64_t width, int gate_up_kind, int down_kind) {
  // gate and up interleaved by 16, so that a panel holds both halves of 16 products
  make_linear(gate_up, {{2 * pad_to(width, 16), gate_up_kind}}, config_.hidden, config_.mlp_bias);
  make_linear(down, {{config_.hidden, down_kind}}, width, config_.mlp_bias);
}

void Model::expect_shape(PacelineTensor kind, bool of_expert, int64_t rows, int64_t columns) const {
  const PacelineConfig& c = config_;
  const int64_t q = c.heads * c.head_dim, k = c.kv_heads * c.head_dim, inner = of_expert ? c.expert_inner : c.inner;
  int64_t want[2] = {1, c.hidden};
  switch (kind) {
    case PL_EMBEDDING: case PL_HEAD: want[0] = c.vocab; break;
    case PL_Q: want[0] = q; break;
    case PL_K: case PL_V: want[0] = k; break;
    case PL_O: want[0] = c.hidden; want[1] = q; break;
    case PL_GATE: case PL_UP: want[0] = inner; break;
    case PL_DOWN: want[0] = c.hidden; want[1] = inner; break;
    case PL_ROUTER: want[0] = c.experts; break;
    case PL_ROUTER_BIAS: want[1] = c.experts; break;
    case PL_SINKS: want[1] = c.heads; break;
    case PL_Q_NORM: want[1] = c.qk_norm_whole ? q : c.head_dim; break;
    case PL_K_NORM: want[1] = c.qk_norm_whole ? k : c.head_dim; break;
    case PL_Q_BIAS: want[1] = q; break;
    case PL_K_BIAS: case PL_V_BIAS: want[1] = k; break;
    case PL_GATE_BIAS: case PL_UP_BIAS: want[1] = inner; break;
    default: break;
  }
  require(rows == want[0] && columns == want[1],
          std::string(kNames[kind]) + " has shape [" + std::to_string(rows) + ", " + std::to_string(columns) +
              "], expected [" + std::to_string(want[0]) + ", " + std::to_string(want[1]) + "]");
}

void Model::pack(Linear& linear, Source type, const void* data, int64_t rows, int64_t offset, int64_t spread,
                 int64_t phase) {
  for (Matrix& part : linear.parts) {
    if (offset < part.rows()) return pack(part, type, data, rows, offset, spread, phase);
    offset -= part.rows();
  }
}

// Source row r goes to row offset + r, or, with spread 32, to the 16 rows at `phase` of every 32.
void Model::pack(Matrix& matrix, Source type, const void* data, int64_t rows, int64_t offset, int64_t spread,
                 int64_t phase) {
  const int64_t columns = matrix.columns(), stride = source_row_bytes(type, columns);
  require(stride > 0, "rows of " + std::to_string(columns) + " values cannot be stored in this type");
  require(matrix.takes(type), "GGUF's type " + std::to_string(int(type)) + " is not what the matrix is kept in, kind " +
                                  std::to_string(int(matrix.kind())));
  // threads split at the destination's panels where rows are consecutive: neighbours share lines
  const int64_t run = spread ? 16 : kPanel, lead = spread ? 0 : offset % kPanel;
  const int64_t runs = (lead + rows + run - 1) / run;
  const size_t scratch = size_t(pad_to(int64_t(matrix.pack_scratch()), 16));
  const auto memory = std::make_unique_for_overwrite<float[]>(size_t(team_.size()) * scratch);
  team_.run([&](int member) {
    float* own = memory.get() + size_t(member) * scratch;
    team_.each(member, runs, 1, [&](int64_t i) {
      const int64_t begin = i * run - lead < 0 ? 0 : i * run - lead;
      const int64_t end = (i + 1) * run - lead < rows ? (i + 1) * run - lead : rows;
      const int64_t to = spread ? begin / 16 * spread + phase : offset + begin;
      const void* from = static_cast<const uint8_t*>(data) + begin * stride;
      matrix.pack_rows(to, end - begin, type, from, stride, *kernels_, own);
    });
  });
}

size_t Model::place_of(PacelineTensor kind, int64_t layer, int64_t expert) const {
  const bool of_expert = of_mlp(kind) && !layers_[size_t(layer)].experts.empty();
  return size_t((layer * (1 + config_.experts) + (of_expert ? 1 + expert : 0)) * PL_TENSORS + kind);
}

void Model::load(PacelineTensor kind, int layer_index, int expert, Source type, const void* data, int64_t rows,
                 int64_t columns) {
  require(kind >= 0 && kind < PL_TENSORS, "unknown tensor kind");
  const bool of_layer = kind > PL_HEAD;
  require(layer_index >= 0 && layer_index < (of_layer ? config_.layers : 1),
          "layer " + std::to_string(layer_index) + " of " + std::to_string(config_.layers));
  Layer& layer = layers_[size_t(layer_index)];
  const bool of_expert = of_mlp(kind) && !layer.experts.empty();
  require(expert >= 0 && expert < (of_expert ? config_.experts : 1),
          std::string(kNames[kind]) + " of expert " + std::to_string(expert) + " is not part of this model");
  expect_shape(kind, of_expert, rows, columns);
  require(source_row_bytes(type, columns) > 0, std::string(kNames[kind]) + ": this type cannot hold its rows");
  Linear& gate_up = of_expert ? layer.experts[size_t(expert)].gate_up : layer.gate_up;
  Linear& down = of_expert ? layer.experts[size_t(expert)].down : layer.down;
  const int64_t d = config_.head_dim, q = config_.heads * d, k = config_.kv_heads * d;
  auto vector = [&](std::vector<float>& out, int64_t offset = 0) {
    require(int64_t(out.size()) >= offset + columns, std::string(kNames[kind]) + " is not part of this model");
    decode_row(type, data, 0, columns, out.data() + offset);
  };
  auto interleaved = [&](std::vector<float>& out, int64_t phase) {
    require(!out.empty(), std::string(kNames[kind]) + " is not part of this model");
    std::vector<float> row(size_t(columns), 0.0f);
    decode_row(type, data, 0, columns, row.data());
    for (int64_t i = 0; i < columns; ++i) out[size_t(i / 16 * 32 + phase + i % 16)] = row[size_t(i)];
  };
  switch (kind) {
    case PL_EMBEDDING:
      pack(embedding_.rows() ? embedding_ : head_.parts[0], type, data, rows, 0, 0, 0);
      break;
    case PL_HEAD:
      require(!config_.headless, "lm_head is not part of a model without logits");
      require(!config_.tied, "lm_head is not part of a model with tied embeddings");
      pack(head_, type, data, rows, 0, 0, 0);
      break;
    case PL_FINAL_NORM: vector(final_norm_); break;
    case PL_ATTENTION_NORM: vector(layer.attention_norm); break;
    case PL_MLP_NORM: vector(layer.mlp_norm); break;
    case PL_ATTENTION_OUT_NORM: vector(layer.attention_out_norm); break;
    case PL_MLP_OUT_NORM: vector(layer.mlp_out_norm); break;
    case PL_Q_NORM: vector(layer.q_norm); break;
    case PL_K_NORM: vector(layer.k_norm); break;
    case PL_Q: pack(layer.qkv, type, data, rows, 0, 0, 0); break;
    case PL_K: pack(layer.qkv, type, data, rows, q, 0, 0); break;
    case PL_V: pack(layer.qkv, type, data, rows, q + k, 0, 0); break;
    case PL_O: pack(layer.out, type, data, rows, 0, 0, 0); break;
    case PL_GATE: pack(gate_up, type, data, rows, 0, kPanel, 0); break;
    case PL_UP: pack(gate_up, type, data, rows, 0, kPanel, 16); break;
    case PL_DOWN: pack(down, type, data, rows, 0, 0, 0); break;
    case PL_Q_BIAS: vector(layer.qkv.bias); break;
    case PL_K_BIAS: vector(layer.qkv.bias, q); break;
    case PL_V_BIAS: vector(layer.qkv.bias, q + k); break;
    case PL_O_BIAS: vector(layer.out.bias); break;
    case PL_GATE_BIAS: interleaved(gate_up.bias, 0); break;
    case PL_UP_BIAS: interleaved(gate_up.bias, 16); break;
    case PL_DOWN_BIAS: vector(down.bias); break;
    case PL_ROUTER:
      require(!layer.experts.empty(), "router is not part of a layer with one MLP");
      pack(layer.router, type, data, rows, 0, 0, 0);
      break;
    case PL_ROUTER_BIAS: vector(layer.router.bias); break;
    case PL_SINKS:
      vector(layer.sinks);
      for (float& sink : layer.sinks) sink *= kLog2e;
      break;
    default: break;
  }
  loaded_[place_of(kind, layer_index, expert)] = 1;
}

std::vector<AdaptedProduct> Model::adapted_products() const {
  const int64_t q = config_.heads * config_.head_dim, k = config_.kv_heads * config_.head_dim, d = config_.inner;
  std::vector<AdaptedProduct> found;
  auto add = [&](const Linear& linear, std::vector<AdaptedRows> matrices, int first) {
    AdaptedProduct product;
    product.first = first;
    if (!linear.parts.empty()) {
      product.columns = linear.columns();
      for (const Matrix& part : linear.parts) product.parts.push_back(part.rows());
      product.matrices = std::move(matrices);
    }
    found.push_back(std::move(product));
  };
  for (const Layer& layer : layers_) {
    add(layer.qkv, {{0, q, 0, 0}, {q, k, 0, 0}, {q + k, k, 0, 0}}, 0);
    add(layer.out, {{0, config_.hidden, 0, 0}}, 3);
    add(layer.gate_up, {{0, d, kPanel, 0}, {0, d, kPanel, 16}}, 4);
    add(layer.down, {{0, config_.hidden, 0, 0}}, 6);
  }
  return found;
}

std::vector<Model::Piece> Model::pieces() {
  std::vector<Piece> found;
  auto add = [&](void* data, size_t bytes) {
    if (bytes) found.push_back({data, bytes});
  };
  auto floats = [&](std::vector<float>& values) { add(values.data(), values.size() * sizeof(float)); };
  auto linear = [&](Linear& of) {
    for (Matrix& part : of.parts) part.each_piece(add);
    floats(of.bias);
  };
  for (Layer& layer : layers_) {
    for (Linear* of : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down, &layer.router}) linear(*of);
    for (Expert& expert : layer.experts)
      for (Linear* of : {&expert.gate_up, &expert.down}) linear(*of);
    for (std::vector<float>* values : {&layer.attention_norm, &layer.mlp_norm, &layer.q_norm, &layer.k_norm,
                                       &layer.attention_out_norm, &layer.mlp_out_norm, &layer.sinks})
      floats(*values);
  }
  linear(head_);
  if (embedding_.rows()) embedding_.each_piece(add);
  floats(final_norm_);
  return found;
}

void Model::restored() {
  loaded_.assign(loaded_.size(), 1);
}

void Model::set_rope(int table, const float* cos, const float* sin) {
  require(table >= 0 && table < int(cos_.size()), "there are two rotary tables");
  const size_t n = size_t(config_.max_positions * config_.head_dim / 2);
  cos_[size_t(table)].assign(cos, cos + n);
  sin_[size_t(table)].assign(sin, sin + n);
}

bool Model::has_tensor(int kind, const Layer& layer) const {
  const PacelineConfig& c = config_;
  switch (kind) {
    case PL_HEAD: return !c.tied && !c.headless;
    case PL_ATTENTION_NORM: case PL_MLP_NORM: return c.norms & 1;
    case PL_ATTENTION_OUT_NORM: case PL_MLP_OUT_NORM: return c.norms & 2;
    case PL_Q_NORM: case PL_K_NORM: return c.qk_norm;
    case PL_Q_BIAS: case PL_K_BIAS: case PL_V_BIAS: return c.qkv_bias;
    case PL_O_BIAS: return c.o_bias;
    case PL_GATE_BIAS: case PL_UP_BIAS: case PL_DOWN_BIAS: return c.mlp_bias;
    case PL_ROUTER: return !layer.experts.empty();
    case PL_ROUTER_BIAS: return !layer.experts.empty() && c.router_bias;
    case PL_SINKS: return c.sinks;
    default: return true;
  }
}

void Model::ready() {
  check_loaded();
  team_.renew();
}

void Model::check_loaded() const {
  for (int64_t i = 0; i < config_.layers; ++i) {
    const Layer& layer = layers_[size_t(i)];
    for (int kind = 0; kind < PL_TENSORS; ++kind) {
      if ((kind <= PL_HEAD && i > 0) || !has_tensor(kind, layer)) continue;
      const bool of_expert = of_mlp(PacelineTensor(kind)) && !layer.experts.empty();
      for (int64_t expert = 0; expert < (of_expert ? config_.experts : 1); ++expert)
        if (!loaded_[place_of(PacelineTensor(kind), i, expert)])
          refuse(std::string(kNames[kind]) + (of_expert ? " of expert " + std::to_string(expert) : "") + " of layer " +
                 std::to_string(i) + " was not loaded");
    }
  }
  for (const Layer& layer : layers_)
    require(layer.rope < 0 || !cos_[size_t(layer.rope)].empty(), "the rotary tables were not set");
}

}  // namespace paceline
