// Attention of a step: what is computed by whom, keys and values into the cache, and the products themselves.
#include <cmath>
#include <stdexcept>

#include "split_kv.h"
#include "model.h"

namespace paceline {
void Model::plan_attention(const PacelineStep& step, int window, AttendPlan& plan) {
  plan.whole.clear();
  const int64_t most = kernels_->attend_rows;
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
        item.key_begin = oldest / (kWindowTiles * kTile) * (kWindowTiles * kTile);
        item.part = -1;
        plan.whole.push_back(item);
      }
    }
  }
  cut_long(plan, team_.size());
  // and two of each member's own, for parts that are merged as they come
  const int64_t own = 2 * kMaxRows * team_.size();
  parts_.reserve(size_t(plan.parts + own) * size_t(config_.head_dim + 16) * 4);
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
  const float* sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
  // a head's sink is in the sum of weights and has no value; the power is bounded so that no sum is infinite
  auto finish = [&](float* part, int64_t head, float* to) {
    if (sinks) part[d + 1] += std::exp2(std::fmin(sinks[head] - part[d], 126.0f));
    kernels_->finish_parts(part, int(d), to);
  };
  // of the last layer's outputs nobody reads those of tokens that are not sampled
  auto unread = [&](const auto& of) {
    const int64_t start = step.query_start[of.sequence];
    const int64_t from = start + of.row / group_, to = start + (of.row + of.rows - 1) / group_;
    return last && sampled_before_[size_t(from)] == sampled_before_[size_t(to + 1)];
  };
  team_.each(member, int64_t(plan.items.size()), 1, [&](int64_t i) {
    const AttendItem& item = plan.items[size_t(i)];
    if (unread(item)) return;
    const int64_t start = step.query_start[item.sequence];
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
    args.softcap = kLog2e * c.attention_softcap;
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
    args.split = sinks || item.part >= 0 || parts_of(item.key_begin, item.key_end) > 1;
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
        finish(parts + (own + r) * part_stride, item.kv_head * group_ + (item.row + r) % group_, outs[r]);
  });
  if (plan.merges.empty()) return;
  team_.each(member, int64_t(plan.merges.size()), 1, [&](int64_t i) {
    const MergeItem& merge = plan.merges[size_t(i)];
    if (unread(merge)) return;
    float* into = parts + merge.part * part_stride;
    for (int p = 1; p < merge.parts; ++p)
      kernels_->merge_part(into + p * kMaxRows * part_stride, merge.rows, part_stride, int(d), into);
    for (int r = 0; r < merge.rows; ++r) {
      const int64_t flat = merge.row + r, token = step.query_start[merge.sequence] + flat / group_;
      const int64_t head = merge.kv_head * group_ + flat % group_;
      finish(into + r * part_stride, head, out + token * width + head * d);
    }
  });
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

}  // namespace paceline
