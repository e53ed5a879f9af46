// One step of the model: every member of the team walks through the same stages.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "convert.h"
#include "model.h"

namespace paceline {
namespace {

// With so many rows for each of two members, each takes its own through all products from one attention
// to the next: nobody waits for anybody, rows stay in the caches of one processor, and reading the
// weights once a member is hidden behind the products. Every further member reads them once more, so
// the rows it takes grow with the members.
constexpr int64_t kRowsAlone = 6;
// Rows of a product that adapters add to, at a time: whole tiles, so that there are no more of them than without.
constexpr int64_t kAddedRows = 24;

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
  x_.reserve(n * size_t(hidden_pad_) * 4);
  xr_.reserve(size_t(sampled) * size_t(hidden_pad_) * 4);
  act_bytes_ = pad_to(widest(), 64) * 4;
  act_scales_ = q4_scales(widest()) + 2;
  acts_buffer_.reserve(n * size_t(act_bytes_));
  scales_.reserve(n * size_t(act_scales_) * 4);
  qkv_.reserve(n * size_t(pad_to(qkv_rows_, 16)) * 4);
  queries_.reserve(n * size_t(attended) * 4);
  query_scales_.reserve(n * size_t(c.heads) * 4);
  if (c.norms & 2) given_.reserve(n * size_t(hidden_pad_) * 4);
  attended_.reserve(n * size_t(attended) * 4);
  inner_.reserve(n * size_t(pad_to(inner_pad_, 32)) * 4);
  rows_.reserve(size_t(team_.size()) * size_t(pad_to(widest(), 16)) * 4);
  if (c.experts > 0) reserve_experts(int64_t(n));
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
  if (!step.hidden && !step.logits) logits_.reserve(size_t(step.sampled * c.vocab) * 4);
  prepare_adapters(step);
  plan_attention(step, 0, plan_);
  bool sliding = false;
  for (const Layer& layer : layers_) sliding = sliding || layer.sliding;
  if (sliding) plan_attention(step, int(c.sliding_window), sliding_plan_);
}

void Model::prepare_adapters(const PacelineStep& step) {
  token_adapters_.clear();
  if (!step.adapters) return;
  bool any = false;
  int64_t most = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const Adapter* adapter = reinterpret_cast<const Adapter*>(step.adapters[s]);
    if (!adapter || step.adapter_scales[s] == 0) continue;
    if (adapter->layers() != config_.layers)
      throw std::invalid_argument("the adapter of sequence " + std::to_string(s) + " is of a model of " +
                                  std::to_string(adapter->layers()) + " layers");
    any = true;
    most = adapter->rank() > most ? adapter->rank() : most;
  }
  if (!any) return;
  const int64_t rows = step.tokens > step.sampled ? step.tokens : step.sampled;
  token_adapters_.resize(size_t(step.tokens));
  for (int64_t t = 0; t < step.tokens; ++t) {
    const int32_t s = sequence_of_[size_t(t)];
    token_adapters_[size_t(t)] = {reinterpret_cast<const Adapter*>(step.adapters[s]), step.adapter_scales[s]};
    if (step.adapter_scales[s] == 0) token_adapters_[size_t(t)] = {};
  }
  sampled_adapters_.resize(size_t(step.sampled));
  for (int64_t i = 0; i < step.sampled; ++i)
    sampled_adapters_[size_t(i)] = token_adapters_[size_t(step.sample_rows[i])];
  row_adapters_.resize(size_t(rows));
  shrunk_stride_ = pad_to(rows, 16);
  shrunk_.reserve(size_t(shrunk_stride_ * most) * 4);
  added_.reserve(size_t(team_.size() * rows) * sizeof(Sums));
  rows_.reserve(size_t(team_.size()) * size_t(pad_to(widest(), 16)) * 4 * kShrunkRows);
  find_runs(token_adapters_, token_runs_);
  find_runs(sampled_adapters_, sampled_runs_);
}

// Rows of one adapter read its matrices together, but the team shares few rows out before it shares those.
void Model::find_runs(const std::vector<AdapterUse>& uses, std::vector<int64_t>& runs) const {
  const int64_t rows = int64_t(uses.size()), size = team_.size();
  const int64_t most = rows >= kShrunkRows * size ? kShrunkRows : (rows + size - 1) / size;
  runs.clear();
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    const AdapterUse& use = uses[size_t(begin)];
    for (end = begin + 1; end < rows && uses[size_t(end)].adapter == use.adapter && uses[size_t(end)].scale == use.scale;)
      ++end;
    // equal parts rather than full ones and a thin rest
    for (int64_t parts = (end - begin + most - 1) / most, r = begin; parts > 0; --parts) {
      runs.push_back(r);
      r += (end - r + parts - 1) / parts;
    }
  }
  runs.push_back(rows);
}

void Model::shrink_run(const Adapted& adapted, int64_t row, int64_t count, const float* const* x, int64_t columns) {
  const AdapterUse& use = adapted.uses[row];
  const AdapterProduct* product = use.adapter ? &use.adapter->product(adapted.layer, adapted.part) : nullptr;
  if (!product || !product->rank) {
    for (int64_t r = row; r < row + count; ++r) row_adapters_[size_t(r)].panels = nullptr;
    return;
  }
  ShrinkArgs args;
  for (int64_t r = 0; r < count; ++r) args.x[r] = x[r];
  args.count = int(count);
  args.columns = columns;
  args.a = product->a;
  args.values = use.adapter->values();
  args.rank = product->rank;
  args.scales = product->scales;
  args.factor = use.scale;
  args.shrunk = {shrunk_rows() + row, shrunk_stride_};
  kernels_->shrink(args);
  for (int64_t r = 0; r < count; ++r)
    row_adapters_[size_t(row + r)] = {product->panels.data(), args.values};
}

template <class F>
void Model::each_run(int member, const Share& share, const Adapted& adapted, F&& f) {
  if (!adapted.uses) return each_row(member, share, [&](int64_t r) { f(r, int64_t(1)); });
  const std::vector<int64_t>& runs = adapted.uses == token_adapters_.data() ? token_runs_ : sampled_runs_;
  if (!share.alone)
    return team_.each(member, int64_t(runs.size()) - 1, 1,
                      [&](int64_t run) { f(runs[size_t(run)], runs[size_t(run) + 1] - runs[size_t(run)]); });
  const int64_t last = share.begin + share.rows;
  // a run may be of two members, as rows are the same in parts of it
  for (auto run = std::upper_bound(runs.begin(), runs.end(), share.begin) - 1; run + 1 < runs.end() && *run < last; ++run) {
    const int64_t begin = std::max(*run, share.begin), end = std::min(run[1], last);
    if (begin < end) f(begin - share.begin, end - begin);
  }
}

void Model::shrink_rows(int member, const Share& share, const uint8_t* x, int64_t stride, bool bf16,
                        const Adapted& adapted) {
  if (!adapted.uses) return;
  float* scratch = scratch_of(member);
  const int64_t width = pad_to(config_.inner, 16);
  each_run(member, share, adapted, [&](int64_t first, int64_t count) {
    const float* rows[kShrunkRows];
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* from = x + (first + r) * stride;
      rows[r] = bf16 ? scratch + r * width : reinterpret_cast<const float*>(from);
      for (int64_t i = 0; bf16 && i < config_.inner; ++i) {
        uint16_t half;
        memcpy(&half, from + i * 2, 2);
        scratch[r * width + i] = bf16_to_float(half);
      }
    }
    shrink_run(adapted, share.begin + first, count, rows, config_.inner);
  });
}

void Model::forward(const PacelineStep& step) {
  prepare(step);
  if (step.tokens == 0) return;
  last_mark_ = profile_ ? seconds_now() : 0;
  offered_ = wanted_ ? seconds_now() : 0;
  paces_.settle(team_.size());
  team_.run([&](int member) { run_step(step, member); });
}

int64_t Model::hand_over(const int64_t* wanted, void (*offer)(), double slice) {
  wanted_ = wanted;
  offer_ = offer;
  slice_ = slice;
  return int64_t(layers_.size());
}

bool Model::is_wanted() const {
  // another process writes it at any time
  return wanted_ && __atomic_load_n(wanted_, __ATOMIC_RELAXED) != 0 && seconds_now() - offered_ >= slice_;
}

void Model::pause(int member) {
  const double taken = team_.pause(member, offer_);
  if (member != 0) return;
  offered_ = seconds_now();
  last_mark_ += taken;
}

Model::Share Model::share_of(int member, int64_t rows) {
  Share share{0, rows, rows, false, acts_buffer_.data(), reinterpret_cast<float*>(scales_.data())};
  const int64_t size = team_.size();
  if (size == 1 || rows < kRowsAlone * size * size / 2) return share;
  share.begin = paces_.begin(member, size, rows);
  share.rows = paces_.begin(member + 1, size, rows) - share.begin;
  share.alone = true;
  share.acts += share.begin * act_bytes_;
  share.scales += share.begin * act_scales_;
  return share;
}

void Model::encode_rows(int member, const Share& share, const float* x, const int32_t* chosen, int64_t columns,
                        int64_t stride, const Linear& next, const Adapted& adapted) {
  const Shape shape = shape_of(next);
  const int64_t padded = pad_to(columns, 4);
  each_run(member, share, adapted, [&](int64_t first, int64_t count) {
    const float* rows[kShrunkRows];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = share.begin + first + r;
      rows[r] = x + (chosen ? chosen[row] : row) * stride;
      kernels_->encode(rows[r], columns, padded, shape.acts, share.acts + (first + r) * shape.bytes,
                       share.scales + (first + r) * shape.scales);
    }
    if (adapted.uses) shrink_run(adapted, share.begin + first, count, rows, columns);
  });
}

template <class F>
void Model::norm_rows(int member, const Share& share, const float* x, const std::vector<float>& weight,
                      const Linear& next, const Adapted& adapted, F&& before) {
  const Shape shape = shape_of(next);
  const int64_t n = config_.hidden, padded = pad_to(n, 4);
  float* scratch = scratch_of(member);
  each_run(member, share, adapted, [&](int64_t first, int64_t count) {
    const float* rows[kShrunkRows];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      before(r);
      rows[i] = x + r * hidden_pad_;
      if (!weight.empty()) {
        float* normed = scratch + i * hidden_pad_;
        kernels_->rms_norm(rows[i], weight.data(), n, config_.sum_eps, normed);
        rows[i] = normed;
      }
      kernels_->encode(rows[i], n, padded, shape.acts, share.acts + r * shape.bytes, share.scales + r * shape.scales);
    }
    if (adapted.uses) shrink_run(adapted, share.begin + first, count, rows, n);
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
  args.limit = config_.swiglu_limit;
  return args;
}

void Model::multiply(int member, const Share& share, const Linear& linear, const uint8_t* acts, int64_t acts_stride,
                     Epilogue epilogue, void* out, int64_t out_stride, bool out_bf16, bool adapted) {
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
  if (adapted) {
    args.adapters = row_adapters_.data() + share.begin;
    args.shrunk = {shrunk_rows() + share.begin, shrunk_stride_};
    args.added = reinterpret_cast<Sums*>(added_.data()) + member * int64_t(added_.size() / sizeof(Sums)) / team_.size();
  }
  auto run = [this](const GemmArgs& args, Weights kind, int64_t begin, int64_t end, int64_t panel) {
    const auto kernel = kernels_->gemm[int(kind)];
    if (!args.adapters) return kernel(args, begin, end, panel);
    // in parts, so that what is added to their rows is still in the first cache when these are multiplied
    for (int64_t next; begin < end; begin = next) {
      next = std::min(end, begin + kAddedRows);
      kernels_->expand(args, begin, next, panel);
      kernel(args, begin, next, panel);
    }
  };
  const int64_t panels = linear.panel_count(), blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int64_t block = blocks ? (rows + blocks - 1) / blocks : 0, first_panels = linear.parts[0].panel_count();
  auto compute = [&](int64_t item) {
    const int64_t begin = item / panels * block, end = begin + block < rows ? begin + block : rows;
    int64_t panel = item % panels;
    if (panel < first_panels) return run(args, linear.parts[0].kind(), begin, end, panel);
    // outputs of further parts lie beside those of the ones before, which are float32
    GemmArgs own = args;
    for (const Matrix& part : linear.parts) {
      if (panel < part.panel_count()) {
        own.w = part.view();
        return run(own, part.kind(), begin, end, panel);
      }
      panel -= part.panel_count();
      own.first_panel += part.panel_count();
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
  const bool adapted = !token_adapters_.empty();
  if (norm.empty())
    return multiply(member, share, linear, acts, acts_stride, Epilogue::kAdd, x, hidden_pad_, false, adapted);
  float* given = reinterpret_cast<float*>(given_.data()) + share.begin * hidden_pad_;
  multiply(member, share, linear, acts, acts_stride, Epilogue::kStore, given, hidden_pad_, false, adapted);
  each_row(member, share, [&](int64_t r) {
    float *from = given + r * hidden_pad_, *into = x + r * hidden_pad_;
    kernels_->rms_norm(from, norm.data(), config_.hidden, config_.eps, from);
    for (int64_t i = 0; i < config_.hidden; ++i) into[i] += from[i];
  });
}

void Model::run_step(const PacelineStep& step, int member) {
  const PacelineConfig& c = config_;
  const int64_t width = c.heads * c.head_dim, qkv_stride = pad_to(qkv_rows_, 16), inner_stride = pad_to(inner_pad_, 32);
  float* x = reinterpret_cast<float*>(x_.data());
  float* qkv = reinterpret_cast<float*>(qkv_.data());
  float* attended = reinterpret_cast<float*>(attended_.data());
  Share share = share_of(member, step.tokens);
  // on rows of its own, and when it went on with them
  double alone = 0, since = share.alone ? seconds_now() : 0;
  const bool adapted = !token_adapters_.empty();
  const AdapterUse* uses = adapted ? token_adapters_.data() : nullptr;

  const Matrix& table = embedding_.rows() ? embedding_ : head_.parts[0];
  each_row(member, share, [&](int64_t r) {
    float* row = x + (share.begin + r) * hidden_pad_;
    table.unpack_row(step.token_ids[share.begin + r], *kernels_, row);
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
              {uses, int64_t(i), kPartQkv}, [&](int64_t r) { expect_kv(share, r, step, int64_t(i)); });
    mark(member, kNorm);
    multiply(member, share, layer.qkv, nullptr, 0, Epilogue::kStore, qkv + share.begin * qkv_stride, qkv_stride, false,
             adapted);
    mark(member, kQkv);
    // all see it behind the barrier that follows, and have seen it when it is written again
    if (member == 0) pausing_ = is_wanted();
    rope_and_store(member, share, step, layer, int64_t(i), qkv);
    if (share.alone) {
      alone += seconds_now() - since;
      if (last) paces_.tell(member, alone);
      team_.barrier();
    }
    mark(member, kRope);
    if (pausing_) pause(member);
    if (last && step.sampled == 0) return;
    attend(member, step, layer, last, attended);
    if (share.alone) since = seconds_now();
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
      if (adapted) uses = sampled_adapters_.data();
    }
    float* own = x + share.begin * hidden_pad_;
    encode_rows(member, share, attended, last ? step.sample_rows : nullptr, width, width, layer.out,
                {uses, int64_t(i), kPartOut});
    mark(member, kEncode);
    multiply_into(member, share, layer.out, nullptr, 0, layer.attention_out_norm, own);
    mark(member, kOut);
    if (!layer.experts.empty()) {
      // their rows are everybody's, and so is the time that they take
      if (share.alone) {
        alone += seconds_now() - since;
        team_.barrier();
      }
      run_experts(member, layer, x, share.total);
      if (share.alone) since = seconds_now();
      continue;
    }
    norm_rows(member, share, own, layer.mlp_norm, layer.gate_up, {uses, int64_t(i), kPartGateUp}, [](int64_t) {});
    mark(member, kNorm);
    const Acts acts = shape_of(layer.down).acts;
    const bool bf16 = acts == Acts::kBF16;
    uint8_t* inner = inner_.data() + share.begin * inner_stride * (bf16 ? 2 : 4);
    multiply(member, share, layer.gate_up, nullptr, 0, gated(), inner, inner_stride, bf16, adapted);
    mark(member, kGateUp);
    if (bf16 || acts == Acts::kF32) {
      shrink_rows(member, share, inner, inner_stride * (bf16 ? 2 : 4), bf16, {uses, int64_t(i), kPartDown});
      multiply_into(member, share, layer.down, inner, inner_stride * (bf16 ? 2 : 4), layer.mlp_out_norm, own);
    } else {
      encode_rows(member, share, reinterpret_cast<const float*>(inner_.data()), nullptr, c.inner, inner_stride, layer.down,
                  {uses, int64_t(i), kPartDown});
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
  norm_rows(member, share, x + share.begin * hidden_pad_, final_norm_, head_, {nullptr, 0, kNoPart}, [](int64_t) {});
  float* logits = (step.logits ? step.logits : reinterpret_cast<float*>(logits_.data())) + share.begin * c.vocab;
  multiply(member, share, head_, nullptr, 0, Epilogue::kStore, logits, c.vocab, false);
  each_row(member, share, [&](int64_t r) {
    float* row = logits + r * c.vocab;
    // capped before the likeliest is sought: of those that the cap makes equal it is the first, as it is for
    // a sampler that reads the logits
    if (c.logits_softcap > 0) kernels_->cap_logits(row, c.vocab, c.logits_softcap);
    step.likeliest[share.begin + r] = kernels_->likeliest(row, c.vocab);
  });
  mark(member, kHead);
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
