// One step of the model: every member of the team walks through the same stages.
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "model.h"

namespace paceline {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
// rows of activations that stay in the second-level cache while panels stream past
constexpr int64_t kRowBlock = 208;
// With so many rows for each of two members, each takes its own through all products from one attention
// to the next: nobody waits for anybody, rows stay in the caches of one processor, and reading the
// weights once a member is hidden behind the products. Every further member reads them once more, so
// the rows it takes grow with the members.
constexpr int64_t kRowsAlone = 6;

// parts of kPartKeys keys that a range reaches into
int parts_of(int key_begin, int key_end) { return (key_end + kPartKeys - 1) / kPartKeys - key_begin / kPartKeys; }

int64_t pad_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

double seconds_now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

[[noreturn]] void refuse(const char* what, int64_t index, int64_t value, int64_t limit) {
  throw std::invalid_argument(std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) +
                              ", must be 0 to " + std::to_string(limit - 1));
}

void check_range(const char* what, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) refuse(what, i, values[i], limit);
}

}  // namespace

void Model::set_profile(bool on) {
  profile_ = on;
  seconds_.fill(0);
}

void Model::mark(int member, Section section) {
  if (!profile_ || member != 0) return;
  const double now = seconds_now();
  seconds_[section] += now - last_mark_;
  last_mark_ = now;
}

Model::Shape Model::shape_of(const Linear& linear) const {
  const int64_t columns = linear.columns();
  const Acts acts = kernels_->acts[int(linear.parts[0].kind())];
  switch (acts) {
    case Acts::kF32: return {acts, pad_to(columns, 16) * 4, 1};
    case Acts::kBF16: return {acts, pad_to(columns, 32) * 2, 1};
    case Acts::kI8: return {acts, pad_to(columns, 64), (columns + kActGroup - 1) / kActGroup + 1};
    default: return {acts, pad_to(columns, 64), q4_scales(columns)};
  }
}

void Model::reserve(int64_t tokens, int64_t sampled) {
  const PacelineConfig& c = config_;
  const size_t n = size_t(tokens > sampled ? tokens : sampled);
  const int64_t attended = c.heads * c.head_dim;
  int64_t widest = hidden_pad_ > inner_pad_ ? hidden_pad_ : inner_pad_;
  if (attended > widest) widest = attended;
  x_.reserve(n * size_t(hidden_pad_) * 4);
  xr_.reserve(size_t(sampled) * size_t(hidden_pad_) * 4);
  act_bytes_ = pad_to(widest, 64) * 4;
  act_scales_ = q4_scales(widest) + 2;
  acts_buffer_.reserve(n * size_t(act_bytes_));
  scales_.reserve(n * size_t(act_scales_) * 4);
  qkv_.reserve(n * size_t(pad_to(qkv_rows_, 16)) * 4);
  queries_.reserve(n * size_t(attended) * 4);
  query_scales_.reserve(n * size_t(c.heads) * 4);
  if (c.norms & 2) given_.reserve(n * size_t(hidden_pad_) * 4);
  attended_.reserve(n * size_t(attended) * 4);
  inner_.reserve(n * size_t(pad_to(inner_pad_, 32)) * 4);
  rows_.reserve(size_t(team_.size()) * size_t(pad_to(widest, 16)) * 4);
}

void Model::plan_attention(const PacelineStep& step, int window, AttendPlan& plan) {
  plan.items.clear();
  plan.merges.clear();
  const int64_t most = kernels_->attend_rows;
  int64_t rows_total = 0;
  for (int64_t s = 0; s < step.sequences; ++s) rows_total += step.query_start[s + 1] - step.query_start[s];
  const int64_t pieces = (rows_total * group_ + most - 1) / most * config_.kv_heads;
  const int64_t wanted = 4 * team_.size();
  int64_t parts = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t begin = step.query_start[s], rows = (step.query_start[s + 1] - begin) * group_;
    for (int32_t head = 0; head < config_.kv_heads; ++head) {
      // the longest first, so that no thread is left with one at the end
      for (int64_t tile = (rows + most - 1) / most - 1; tile >= 0; --tile) {
        AttendItem item{};
        item.sequence = int32_t(s);
        item.kv_head = head;
        item.row = tile * most;
        item.rows = int32_t(rows - item.row < most ? rows - item.row : most);
        const int first_position = step.positions[begin + item.row / group_];
        const int last_position = step.positions[begin + (item.row + item.rows - 1) / group_];
        item.key_end = last_position + 1;
        const int oldest = window > 0 && first_position >= window ? first_position - window + 1 : 0;
        // from an even tile on, see AttendArgs
        item.key_begin = oldest / (2 * kTile) * (2 * kTile);
        item.part = -1;
        // who computes parts depends on the step; what is added up in which order does not
        const int count = parts_of(item.key_begin, item.key_end);
        int64_t splits = team_.size() > 1 && pieces < wanted ? (wanted + pieces - 1) / pieces : 1;
        if (splits > count) splits = count;
        if (splits <= 1) {
          plan.items.push_back(item);
          continue;
        }
        plan.merges.push_back({parts, count, item.rows, item.sequence, item.kv_head, item.row});
        const int first = item.key_begin / kPartKeys;
        for (int64_t i = 0; i < splits; ++i) {
          const int from = first + int(count * i / splits), to = first + int(count * (i + 1) / splits);
          AttendItem piece = item;
          if (i > 0) piece.key_begin = from * kPartKeys;
          if (i + 1 < splits) piece.key_end = to * kPartKeys;
          piece.part = parts + (from - first) * kMaxRows;
          plan.items.push_back(piece);
        }
        parts += count * kMaxRows;
      }
    }
  }
  // and two of each member's own, for parts that are merged as they come
  const int64_t own = 2 * kMaxRows * team_.size();
  plan.parts = parts;
  parts_.reserve(size_t(parts + own) * size_t(config_.head_dim + 16) * 4);
}

void Model::prepare(const PacelineStep& step) {
  const PacelineConfig& c = config_;
  const int64_t n = step.tokens;
  if (config_.headless && !step.hidden) throw std::invalid_argument("this model has no head: ask for hidden states");
  if (n < 0 || step.sequences < 0 || step.sampled < 0) throw std::invalid_argument("negative sizes");
  check_range("token_ids", step.token_ids, n, c.vocab);
  check_range("positions", step.positions, n, c.max_positions);
  check_range("sample_rows", step.sample_rows, step.sampled, n);
  if (c.num_window_blocks && !step.window_tables) throw std::invalid_argument("window_tables are missing");
  for (int64_t i = 1; i < step.sampled; ++i)
    if (step.sample_rows[i] <= step.sample_rows[i - 1])
      throw std::invalid_argument("sample_rows must ascend, entry " + std::to_string(i) + " does not");
  if (step.query_start[0] != 0 || step.query_start[step.sequences] != n)
    throw std::invalid_argument("query_start must run from 0 to the number of tokens, " + std::to_string(n));
  sequence_of_.resize(size_t(n));
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t begin = step.query_start[s], end = step.query_start[s + 1];
    if (end < begin || end > n) throw std::invalid_argument("query_start must not descend");
    if (begin == end) continue;
    for (int64_t t = begin; t < end; ++t) {
      sequence_of_[size_t(t)] = int32_t(s);
      if (t > begin && step.positions[t] != step.positions[t - 1] + 1)
        throw std::invalid_argument("positions of sequence " + std::to_string(s) + " are not consecutive");
    }
    const int64_t blocks = step.positions[end - 1] / c.block_size + 1;
    if (blocks > step.table_width)
      throw std::invalid_argument("sequence " + std::to_string(s) + " reaches block " + std::to_string(blocks) +
                                  " of a table of " + std::to_string(step.table_width));
    check_range("block_tables", step.tables + s * step.table_width, blocks, c.num_blocks);
    if (c.num_window_blocks)
      check_range("window_tables", step.window_tables + s * step.table_width, blocks, c.num_window_blocks);
  }
  sampled_before_.assign(size_t(n + 1), 0);
  for (int64_t i = 0; i < step.sampled; ++i) sampled_before_[size_t(step.sample_rows[i] + 1)] = 1;
  for (int64_t t = 0; t < n; ++t) sampled_before_[size_t(t + 1)] += sampled_before_[size_t(t)];
  reserve(n, step.sampled);
  if (!step.hidden) reserve_choice(step);
  plan_attention(step, 0, plan_);
  bool sliding = false;
  for (const Layer& layer : layers_) sliding = sliding || layer.sliding;
  if (sliding) plan_attention(step, int(c.sliding_window), sliding_plan_);
}

void Model::forward(const PacelineStep& step) {
  prepare(step);
  if (step.tokens == 0) return;
  last_mark_ = profile_ ? seconds_now() : 0;
  team_.run([&](int member) { run_step(step, member); });
  if (!step.hidden && !step.logits && !screens(step)) choices_[kWhole] += step.sampled;
}

Model::Share Model::share_of(int member, int64_t rows) {
  Share share{0, rows, rows, false, acts_buffer_.data(), reinterpret_cast<float*>(scales_.data())};
  const int64_t size = team_.size();
  if (size == 1 || rows < kRowsAlone * size * size / 2) return share;
  share.begin = rows * member / size;
  share.rows = rows * (member + 1) / size - share.begin;
  share.alone = true;
  share.acts += share.begin * act_bytes_;
  share.scales += share.begin * act_scales_;
  return share;
}

void Model::encode_rows(int member, const Share& share, const float* x, const int32_t* chosen, int64_t columns,
                        int64_t stride, const Linear& next) {
  const Shape shape = shape_of(next);
  const int64_t padded = pad_to(columns, 4);
  each_row(member, share, [&](int64_t r) {
    const int64_t row = share.begin + r, from = chosen ? chosen[row] : row;
    kernels_->encode(x + from * stride, columns, padded, shape.acts, share.acts + r * shape.bytes,
                     share.scales + r * shape.scales);
  });
}

template <class F>
void Model::norm_rows(int member, const Share& share, const float* x, const std::vector<float>& weight,
                      const Linear& next, F&& before) {
  const Shape shape = shape_of(next);
  const int64_t n = config_.hidden, padded = pad_to(n, 4);
  float* scratch = reinterpret_cast<float*>(rows_.data()) + member * int64_t(rows_.size() / 4 / size_t(team_.size()));
  each_row(member, share, [&](int64_t r) {
    before(r);
    const float* from = x + r * hidden_pad_;
    if (!weight.empty()) {
      kernels_->rms_norm(from, weight.data(), n, config_.sum_eps, scratch);
      from = scratch;
    }
    kernels_->encode(from, n, padded, shape.acts, share.acts + r * shape.bytes, share.scales + r * shape.scales);
  });
}

GemmArgs Model::product_of(const Share& share, const Linear& linear) const {
  const Shape shape = shape_of(linear);
  GemmArgs args;
  args.a = share.acts;
  args.a_stride = shape.bytes;
  args.a_scale = share.scales;
  args.w = linear.parts[0].view();
  args.bias = linear.has_bias ? linear.bias.data() : nullptr;
  return args;
}

void Model::multiply(int member, const Share& share, const Linear& linear, const uint8_t* acts, int64_t acts_stride,
                     Epilogue epilogue, void* out, int64_t out_stride, bool out_bf16) {
  const int64_t rows = share.rows;
  GemmArgs args = product_of(share, linear);
  if (acts) {
    args.a = acts;
    args.a_stride = acts_stride;
  }
  args.epilogue = epilogue;
  args.out = out;
  args.out_stride = out_stride;
  args.out_bf16 = out_bf16;
  const auto kernel = kernels_->gemm[int(linear.parts[0].kind())];
  const int64_t panels = linear.panel_count(), blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int64_t block = blocks ? (rows + blocks - 1) / blocks : 0, first_panels = linear.parts[0].panel_count();
  auto compute = [&](int64_t item) {
    const int64_t begin = item / panels * block, end = begin + block < rows ? begin + block : rows;
    int64_t panel = item % panels;
    if (panel < first_panels) return kernel(args, begin, end, panel);
    // outputs of further parts lie beside those of the ones before, which are float32
    GemmArgs own = args;
    for (const Matrix& part : linear.parts) {
      if (panel < part.panel_count()) {
        own.w = part.view();
        return kernels_->gemm[int(part.kind())](own, begin, end, panel);
      }
      panel -= part.panel_count();
      own.out = static_cast<float*>(own.out) + part.rows();
      if (own.bias) own.bias += part.rows();
    }
  };
  if (share.alone) {
    for (int64_t item = 0; item < panels * blocks; ++item) compute(item);
    return;
  }
  // runs of panels long enough to stream, short enough that the last one keeps nobody waiting
  int64_t grain = panels * blocks / (team_.size() * 8);
  grain = grain < 1 ? 1 : grain > 16 ? 16 : grain;
  team_.each(member, panels * blocks, grain, compute);
}

void Model::multiply_into(int member, const Share& share, const Linear& linear, const uint8_t* acts,
                          int64_t acts_stride, const std::vector<float>& norm, float* x) {
  if (norm.empty()) return multiply(member, share, linear, acts, acts_stride, Epilogue::kAdd, x, hidden_pad_, false);
  float* given = reinterpret_cast<float*>(given_.data()) + share.begin * hidden_pad_;
  multiply(member, share, linear, acts, acts_stride, Epilogue::kStore, given, hidden_pad_, false);
  each_row(member, share, [&](int64_t r) {
    float *from = given + r * hidden_pad_, *into = x + r * hidden_pad_;
    kernels_->rms_norm(from, norm.data(), config_.hidden, config_.eps, from);
    for (int64_t i = 0; i < config_.hidden; ++i) into[i] += from[i];
  });
}

uint8_t* Model::tile_of(const PacelineStep& step, int64_t token, int64_t layer_index) {
  const Layer& layer = layers_[size_t(layer_index)];
  const int64_t position = step.positions[token], slot = position % config_.block_size;
  const int32_t* table = tables_of(step, layer) + int64_t(sequence_of_[size_t(token)]) * step.table_width;
  return cache_.data() + layer.cache_offset + table[position / config_.block_size] * stride_of(layer) +
         slot / kTile * tile_bytes_;
}

void Model::expect_kv(const Share& share, int64_t row, const PacelineStep& step, int64_t layer_index) {
  const int64_t token = share.begin + row;
  const uint8_t* tile = tile_of(step, token, layer_index);
  for (int64_t h = 0; h < config_.kv_heads; ++h)
    kernels_->expect_kv(int(config_.head_dim), int(step.positions[token] % kTile), kv_, tile + h * head_bytes_);
}

void Model::rope_and_store(int member, const Share& share, const PacelineStep& step, const Layer& layer,
                           int64_t layer_index, float* qkv) {
  const PacelineConfig& c = config_;
  const int64_t d = c.head_dim, stride = pad_to(qkv_rows_, 16), n = step.tokens;
  const int64_t query_bytes = d * kernels_->query_bytes[int(kv_)];
  const float factor = c.attention_scale > 0 ? kLog2e * c.attention_scale : kLog2e / std::sqrt(float(d));
  const bool each_normed = !layer.q_norm.empty() && !c.qk_norm_whole;
  float* query_scales = reinterpret_cast<float*>(query_scales_.data());
  each_row(member, share, [&](int64_t r) {
    const int64_t t = share.begin + r;
    float* row = qkv + t * stride;
    const int64_t position = step.positions[t], slot = position % c.block_size;
    uint8_t* tile = tile_of(step, t, layer_index);
    const float *cos = nullptr, *sin = nullptr;
    if (layer.rope >= 0) {
      cos = cos_[size_t(layer.rope)].data() + position * (d / 2);
      sin = sin_[size_t(layer.rope)].data() + position * (d / 2);
    }
    if (c.qk_norm_whole && !layer.q_norm.empty()) {
      kernels_->rms_norm(row, layer.q_norm.data(), c.heads * d, c.eps, row);
      kernels_->rms_norm(row + c.heads * d, layer.k_norm.data(), c.kv_heads * d, c.eps, row + c.heads * d);
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      float* q = row + h * d;
      if (each_normed) kernels_->rms_norm(q, layer.q_norm.data(), d, c.eps, q);
      if (cos) kernels_->rope(q, cos, sin, int(d));
      const int64_t at = (h / group_ * n + t) * group_ + h % group_;
      kernels_->encode_query(q, int(d), factor, kv_, queries_.data() + at * query_bytes, query_scales + at);
    }
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      float *k = row + (c.heads + h) * d, *v = row + (c.heads + c.kv_heads + h) * d;
      if (each_normed) kernels_->rms_norm(k, layer.k_norm.data(), d, c.eps, k);
      if (cos) kernels_->rope(k, cos, sin, int(d));
      kernels_->store_kv(k, v, int(d), int(slot % kTile), kv_, tile + h * head_bytes_);
    }
  });
}

void Model::attend(int member, const PacelineStep& step, const Layer& layer, bool last, float* out) {
  const PacelineConfig& c = config_;
  const AttendPlan& plan = layer.sliding ? sliding_plan_ : plan_;
  const int window = layer.sliding ? int(c.sliding_window) : 0;
  const int64_t d = c.head_dim, width = c.heads * d, part_stride = d + 16;
  const int64_t query_bytes = d * kernels_->query_bytes[int(kv_)];
  float* parts = reinterpret_cast<float*>(parts_.data());
  const int64_t own = plan.parts + 2 * kMaxRows * member;
  team_.each(member, int64_t(plan.items.size()), 1, [&](int64_t i) {
    const AttendItem& item = plan.items[size_t(i)];
    const int64_t start = step.query_start[item.sequence];
    if (last) {
      // nobody reads the others' outputs
      const size_t from = size_t(start + item.row / group_), to = size_t(start + (item.row + item.rows - 1) / group_);
      if (sampled_before_[from] == sampled_before_[to + 1]) return;
    }
    AttendArgs args;
    const int64_t query = (item.kv_head * step.tokens + start) * group_ + item.row;
    args.q = queries_.data() + query * query_bytes;
    args.q_stride = query_bytes;
    args.q_scale = reinterpret_cast<const float*>(query_scales_.data()) + query;
    args.layer = cache_.data() + layer.cache_offset;
    args.block_bytes = stride_of(layer);
    args.head_bytes = head_bytes_;
    args.kv_head = item.kv_head;
    args.head_dim = int(d);
    args.tiles_per_block = int(c.block_size / kTile);
    args.table = tables_of(step, layer) + item.sequence * step.table_width;
    args.rows = item.rows;
    int32_t first[kMaxRows], limit[kMaxRows];
    float* outs[kMaxRows];
    for (int r = 0; r < item.rows; ++r) {
      const int64_t flat = item.row + r, token = start + flat / group_;
      limit[r] = step.positions[token] + 1;
      first[r] = window > 0 && limit[r] > window ? limit[r] - window : 0;
      outs[r] = out + token * width + (item.kv_head * group_ + flat % group_) * d;
    }
    args.first = first;
    args.limit = limit;
    args.split = item.part >= 0 || parts_of(item.key_begin, item.key_end) > 1;
    int64_t part = item.part >= 0 ? item.part : own;
    for (int key = item.key_begin; key < item.key_end; key = args.key_end) {
      const int end = (key / kPartKeys + 1) * kPartKeys;
      args.key_begin = key;
      args.key_end = end < item.key_end ? end : item.key_end;
      if (args.key_end < item.key_end) {
        args.next_table = args.table;
        args.next_head = args.kv_head;
        args.next_begin = args.key_end;
        args.next_end = item.key_end;
      } else if (i + 1 < int64_t(plan.items.size())) {
        const AttendItem& next = plan.items[size_t(i + 1)];
        args.next_table = tables_of(step, layer) + next.sequence * step.table_width;
        args.next_head = next.kv_head;
        args.next_begin = next.key_begin;
        args.next_end = next.key_end;
      } else {
        args.next_end = 0;
      }
      for (int r = 0; r < item.rows; ++r) args.out[r] = args.split ? parts + (part + r) * part_stride : outs[r];
      kernels_->attend[int(kv_)](args);
      if (item.part >= 0) {
        part += kMaxRows;
        continue;
      }
      // the second and further ones go beside the first, and into it
      if (part != own)
        kernels_->merge_part(parts + part * part_stride, item.rows, part_stride, int(d), parts + own * part_stride);
      part = own + kMaxRows;
    }
    if (item.part < 0 && args.split)
      for (int r = 0; r < item.rows; ++r)
        kernels_->finish_parts(parts + (own + r) * part_stride, int(d), outs[r]);
  });
  if (plan.merges.empty()) return;
  team_.each(member, int64_t(plan.merges.size()), 1, [&](int64_t i) {
    const MergeItem& merge = plan.merges[size_t(i)];
    float* into = parts + merge.part * part_stride;
    for (int p = 1; p < merge.parts; ++p)
      kernels_->merge_part(into + p * kMaxRows * part_stride, merge.rows, part_stride, int(d), into);
    for (int r = 0; r < merge.rows; ++r) {
      const int64_t flat = merge.row + r, token = step.query_start[merge.sequence] + flat / group_;
      kernels_->finish_parts(into + r * part_stride, int(d),
                             out + token * width + (merge.kv_head * group_ + flat % group_) * d);
    }
  });
}

void Model::run_step(const PacelineStep& step, int member) {
  const PacelineConfig& c = config_;
  const int64_t width = c.heads * c.head_dim, qkv_stride = pad_to(qkv_rows_, 16), inner_stride = pad_to(inner_pad_, 32);
  float* x = reinterpret_cast<float*>(x_.data());
  float* qkv = reinterpret_cast<float*>(qkv_.data());
  float* attended = reinterpret_cast<float*>(attended_.data());
  Share share = share_of(member, step.tokens);

  const Matrix& table = embedding_.rows() ? embedding_ : head_.parts[0];
  each_row(member, share, [&](int64_t r) {
    float* row = x + (share.begin + r) * hidden_pad_;
    table.unpack_row(step.token_ids[share.begin + r], row);
    if (c.embedding_scale != 1)
      for (int64_t i = 0; i < c.hidden; ++i) row[i] *= c.embedding_scale;
  });
  mark(member, kEmbed);

  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const bool last = i + 1 == layers_.size();
    // the lines that keys and values of this layer will be written to are asked for here: until then there is
    // a product to compute
    norm_rows(member, share, x + share.begin * hidden_pad_, layer.attention_norm, layer.qkv,
              [&](int64_t r) { expect_kv(share, r, step, int64_t(i)); });
    mark(member, kNorm);
    multiply(member, share, layer.qkv, nullptr, 0, Epilogue::kStore, qkv + share.begin * qkv_stride, qkv_stride, false);
    mark(member, kQkv);
    rope_and_store(member, share, step, layer, int64_t(i), qkv);
    if (share.alone) team_.barrier();
    mark(member, kRope);
    if (last && step.sampled == 0) return;
    attend(member, step, layer, last, attended);
    mark(member, kAttend);
    if (last) {
      // from here on only the sampled rows matter
      share = share_of(member, step.sampled);
      float* y = reinterpret_cast<float*>(xr_.data());
      each_row(member, share, [&](int64_t r) {
        const int64_t to = share.begin + r;
        memcpy(y + to * hidden_pad_, x + step.sample_rows[to] * hidden_pad_, size_t(hidden_pad_) * 4);
      });
      x = y;
    }
    float* own = x + share.begin * hidden_pad_;
    encode_rows(member, share, attended, last ? step.sample_rows : nullptr, width, width, layer.out);
    mark(member, kEncode);
    multiply_into(member, share, layer.out, nullptr, 0, layer.attention_out_norm, own);
    mark(member, kOut);
    norm_rows(member, share, own, layer.mlp_norm, layer.gate_up, [](int64_t) {});
    mark(member, kNorm);
    const Acts acts = shape_of(layer.down).acts;
    const bool bf16 = acts == Acts::kBF16;
    uint8_t* inner = inner_.data() + share.begin * inner_stride * (bf16 ? 2 : 4);
    multiply(member, share, layer.gate_up, nullptr, 0, c.gelu ? Epilogue::kGelu : Epilogue::kSilu, inner, inner_stride,
             bf16);
    mark(member, kGateUp);
    if (bf16 || acts == Acts::kF32) {
      multiply_into(member, share, layer.down, inner, inner_stride * (bf16 ? 2 : 4), layer.mlp_out_norm, own);
    } else {
      encode_rows(member, share, reinterpret_cast<const float*>(inner_.data()), nullptr, c.inner, inner_stride, layer.down);
      mark(member, kEncode);
      multiply_into(member, share, layer.down, nullptr, 0, layer.mlp_out_norm, own);
    }
    mark(member, kDown);
  }
  if (step.hidden) {
    each_row(member, share, [&](int64_t r) {
      const int64_t row = share.begin + r;
      memcpy(step.hidden + row * c.hidden, x + row * hidden_pad_, size_t(c.hidden) * 4);
    });
    return;
  }
  norm_rows(member, share, x + share.begin * hidden_pad_, final_norm_, head_, [](int64_t) {});
  if (screens(step)) {
    choose(member, share, step);
    return mark(member, kHead);
  }
  float* logits = (step.logits ? step.logits : reinterpret_cast<float*>(logits_.data())) + share.begin * c.vocab;
  multiply(member, share, head_, nullptr, 0, Epilogue::kStore, logits, c.vocab, false);
  each_row(member, share, [&](int64_t r) {
    step.likeliest[share.begin + r] = kernels_->likeliest(logits + r * c.vocab, c.vocab);
  });
  mark(member, kHead);
}

void Model::attention_only(const PacelineStep& step, float* qkv, float* out) {
  prepare(step);
  if (step.tokens == 0) return;
  const int64_t stride = pad_to(qkv_rows_, 16);
  if (stride != qkv_rows_) throw std::invalid_argument("unpadded rows only");
  team_.run([&](int member) {
    rope_and_store(member, {0, step.tokens, step.tokens, false, nullptr, nullptr}, step, layers_[0], 0, qkv);
    attend(member, step, layers_[0], false, out);
  });
}

void Model::copy_blocks(const int64_t* from, const int64_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (from[i] < 0 || from[i] >= config_.num_blocks) refuse("source blocks", i, from[i], config_.num_blocks);
    if (to[i] < 0 || to[i] >= config_.num_blocks) refuse("destination blocks", i, to[i], config_.num_blocks);
  }
  uint8_t* base = cache_.data();
  // one after the other: a later pair may copy what an earlier one wrote
  for (int64_t i = 0; i < count; ++i)
    if (from[i] != to[i]) memcpy(base + to[i] * block_bytes_, base + from[i] * block_bytes_, size_t(block_bytes_));
}

}  // namespace paceline
