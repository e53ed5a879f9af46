// Layers whose MLP is a mixture of experts: which of them a row goes to, and their products.
//
// Pairs of a row and one of its experts are sorted by expert, so that an expert's matrices are read once for all of
// its rows, and dealt to the team by (run of pairs, panel of its matrix). What an expert gives a row follows from
// that row alone, as with all products, and a row adds up its experts' outputs in an order of its own. So a row's
// result is the same whichever rows are beside it and wherever they go.
//
// Unlike what is between other attentions, this is done by all members for all rows: what matters is that an
// expert's matrices are not read once a member.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.h"

namespace paceline {
namespace {

// So few that one member sorts them and copies their activations in less time than two meetings take.
constexpr int64_t kFewPairs = 16;

int64_t rows_of_pass(int64_t experts_per_token) { return std::max<int64_t>(1, kPassPairs / experts_per_token); }

float* floats(const Memory& memory) { return reinterpret_cast<float*>(memory.data()); }

}  // namespace

void Model::reserve_experts(int64_t tokens) {
  const PacelineConfig& c = config_;
  const int64_t rows = std::min(tokens, rows_of_pass(c.experts_per_token)), pairs = rows * c.experts_per_token;
  const int64_t widest = std::max(c.hidden, c.expert_inner);
  normed_.reserve(size_t(rows * hidden_pad_) * 4);
  scores_.reserve(size_t(rows * pad_to(c.experts, 16)) * 4);
  pair_acts_.reserve(size_t(pairs * pad_to(widest, 64)) * 4);
  pair_scales_.reserve(size_t(pairs * (q4_scales(widest) + 2)) * 4);
  pair_inner_.reserve(size_t(pairs * pad_to(c.expert_inner, 32)) * 4);
  pair_out_.reserve(size_t(pairs * hidden_pad_) * 4);
  if (int64_t(chosen_.size()) < pairs) {
    chosen_.resize(size_t(pairs));
    shares_.resize(size_t(pairs));
    pair_of_.resize(size_t(pairs));
    row_of_.resize(size_t(pairs));
    // each expert's last run may be a short one
    runs_.resize(size_t(std::min(pairs, c.experts) + pairs / kRowBlock));
  }
  starts_.resize(size_t(c.experts + 1));
}

void Model::run_experts(int member, const Layer& layer, float* x, int64_t rows) {
  const int64_t most = rows_of_pass(config_.experts_per_token);
  for (int64_t begin = 0; begin < rows; begin += most)
    run_pass(member, layer, x + begin * hidden_pad_, std::min(most, rows - begin));
}

void Model::run_pass(int member, const Layer& layer, float* x, int64_t rows) {
  const PacelineConfig& c = config_;
  const int64_t pairs = rows * c.experts_per_token, scores_stride = pad_to(c.experts, 16);
  const Share all{0, rows, rows, false, acts_buffer_.data(), floats(scales_)};
  const Shape shape = shape_of(layer.experts[0].gate_up), inner_shape = shape_of(layer.experts[0].down);
  float *normed = floats(normed_), *scores = floats(scores_), *pair_scales = floats(pair_scales_);

  each_row(member, all, [&](int64_t r) {
    float* to = normed + r * hidden_pad_;
    if (layer.mlp_norm.empty())
      memcpy(to, x + r * hidden_pad_, size_t(c.hidden) * 4);
    else
      kernels_->rms_norm(x + r * hidden_pad_, layer.mlp_norm.data(), c.hidden, c.sum_eps, to);
    kernels_->encode(to, c.hidden, pad_to(c.hidden, 4), shape.acts, all.acts + r * shape.bytes,
                     all.scales + r * shape.scales);
  });
  mark(member, kNorm);
  multiply(member, all, layer.router, normed_.data(), hidden_pad_ * 4, Epilogue::kStore, scores, scores_stride, false);
  auto choose = [&](int64_t r) { choose_experts(scores + r * scores_stride, r); };
  auto gather = [&](int64_t pair) {
    const int64_t r = row_of_[size_t(pair)];
    memcpy(pair_acts_.data() + pair * shape.bytes, all.acts + r * shape.bytes, size_t(shape.bytes));
    memcpy(pair_scales + pair * shape.scales, all.scales + r * shape.scales, size_t(shape.scales) * 4);
  };
  if (pairs <= kFewPairs) {
    if (member == 0) {
      for (int64_t r = 0; r < rows; ++r) choose(r);
      sort_pairs(rows);
      for (int64_t pair = 0; pair < pairs; ++pair) gather(pair);
    }
    team_.barrier();
  } else {
    each_row(member, all, choose);
    if (member == 0) sort_pairs(rows);
    team_.barrier();
    team_.each(member, pairs, row_grain(pairs), gather);
  }
  mark(member, kRoute);
  GemmArgs args;
  args.a = pair_acts_.data();
  args.a_stride = shape.bytes;
  args.a_scale = pair_scales;
  args.epilogue = gated();
  args.limit = c.swiglu_limit;
  args.out = pair_inner_.data();
  args.out_stride = pad_to(c.expert_inner, 32);
  args.out_bf16 = inner_shape.acts == Acts::kBF16;
  multiply_pairs(member, layer, &Expert::gate_up, args);
  mark(member, kGateUp);

  GemmArgs down;
  down.a_scale = pair_scales;
  if (inner_shape.acts == Acts::kF32 || inner_shape.acts == Acts::kBF16) {
    down.a = pair_inner_.data();
    down.a_stride = args.out_stride * (args.out_bf16 ? 2 : 4);
  } else {
    const float* inner = floats(pair_inner_);
    team_.each(member, pairs, row_grain(pairs), [&](int64_t pair) {
      kernels_->encode(inner + pair * args.out_stride, c.expert_inner, pad_to(c.expert_inner, 4), inner_shape.acts,
                       pair_acts_.data() + pair * inner_shape.bytes, pair_scales + pair * inner_shape.scales);
    });
    mark(member, kEncode);
    down.a = pair_acts_.data();
    down.a_stride = inner_shape.bytes;
  }
  down.out = pair_out_.data();
  down.out_stride = hidden_pad_;
  multiply_pairs(member, layer, &Expert::down, down);
  float* sum = scratch_of(member);
  each_row(member, all, [&](int64_t r) {
    const int64_t first = r * c.experts_per_token;
    for (int64_t i = 0; i < c.experts_per_token; ++i) {
      const float* given = floats(pair_out_) + pair_of_[size_t(first + i)] * hidden_pad_;
      const float share = shares_[size_t(first + i)];
      if (i == 0)
        for (int64_t d = 0; d < c.hidden; ++d) sum[d] = share * given[d];
      else
        for (int64_t d = 0; d < c.hidden; ++d) sum[d] += share * given[d];
    }
    if (!layer.mlp_out_norm.empty()) kernels_->rms_norm(sum, layer.mlp_out_norm.data(), c.hidden, c.eps, sum);
    float* into = x + r * hidden_pad_;
    for (int64_t d = 0; d < c.hidden; ++d) into[d] += sum[d];
  });
  mark(member, kDown);
}

// The experts with the highest scores, of equal ones the first, and their shares of what is added to the row.
void Model::choose_experts(const float* scores, int64_t row) {
  const int64_t count = config_.experts_per_token, experts = config_.experts;
  int32_t* chosen = chosen_.data() + row * count;
  float* shares = shares_.data() + row * count;
  int64_t held = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const float score = scores[expert];
    if (held == count && !(score > scores[chosen[count - 1]])) continue;
    int64_t at = held < count ? held++ : count - 1;
    for (; at > 0 && score > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = int32_t(expert);
  }
  const float top = scores[chosen[0]];
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) shares[i] = std::exp(scores[chosen[i]] - top);
  if (config_.normalise_experts)
    for (int64_t i = 0; i < count; ++i) sum += shares[i];
  else
    for (int64_t expert = 0; expert < experts; ++expert) sum += std::exp(scores[expert] - top);
  for (int64_t i = 0; i < count; ++i) shares[i] /= sum;
}

// Pairs of the rows' choices, expert after expert, and of one expert in the order of rows; and their runs.
void Model::sort_pairs(int64_t rows) {
  const int64_t count = config_.experts_per_token, pairs = rows * count;
  std::fill(starts_.begin(), starts_.end(), 0);
  for (int64_t i = 0; i < pairs; ++i) ++starts_[size_t(chosen_[size_t(i)] + 1)];
  run_count_ = 0;
  for (int64_t expert = 0; expert < config_.experts; ++expert) {
    int64_t begin = starts_[size_t(expert)];
    const int64_t own = starts_[size_t(expert + 1)], end = begin + own;
    starts_[size_t(expert + 1)] = end;
    // equal runs rather than full ones and a short rest
    for (int64_t left = (own + kRowBlock - 1) / kRowBlock; left > 0; --left) {
      const int64_t next = begin + (end - begin + left - 1) / left;
      runs_[size_t(run_count_++)] = {int32_t(expert), begin, next};
      begin = next;
    }
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t pair = starts_[size_t(chosen_[size_t(i)])]++;
    pair_of_[size_t(i)] = pair;
    row_of_[size_t(pair)] = int32_t(i / count);
  }
}

// Each run of pairs times one matrix of its expert.
void Model::multiply_pairs(int member, const Layer& layer, Linear Expert::*which, GemmArgs args) {
  const Matrix& first = (layer.experts[0].*which).parts[0];
  const auto kernel = kernels_->gemm[int(first.kind())];
  const int64_t panels = first.panel_count(), items = run_count_ * panels;
  // as in `multiply`
  const int64_t grain = std::clamp<int64_t>(items / (team_.size() * 8), 1, 16);
  team_.each(member, items, grain, [&](int64_t item) {
    const ExpertRun& run = runs_[size_t(item / panels)];
    const Linear& linear = layer.experts[size_t(run.expert)].*which;
    GemmArgs own = args;
    own.w = linear.parts[0].view();
    own.bias = linear.has_bias ? linear.bias.data() : nullptr;
    kernel(own, run.begin, run.end, item % panels);
  });
}

}  // namespace paceline
