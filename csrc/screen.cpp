// The likeliest tokens of a few rows, without reading the whole head.
//
// At few rows a step takes as long as its weights take to arrive, and the head is a third of them. The
// upper halves of its int8 weights are kept once more on their own, and are half as much to read. What
// they leave out of a logit is a sum over the columns of (lower half - 7.5) times the activation. Where
// lower halves are as good as random beside a row of activations, the sum's standard deviation is their
// spread (root mean square about 7.5) times |x|, times the scale of the weights' row. Panels that could
// hold the largest logit if it were kDeviations of these away are computed in full, the most promising
// first, until no other can; where that are too many, all. So the token is the one that the full product
// has, unless its error beats the limit: of 28 million logits of SmolLM2-135M none came to more than 5.2
// deviations.
//
// Rows of few values, such as those with one large column in a group, have lower halves that are anything
// but random, and activations like them add up all they leave out. So lower halves are counted when the
// head is packed, and panels with a row whose counts are not those of random numbers are always computed
// in full.
//
// Where logits are soft-capped, the token is the one that capped logits have: the first of those that are equal to the
// last bit, as logits far above the cap are. So panels are compared by what the cap makes of their logits and limits,
// and all of those are computed that could reach the largest or be equal to it.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

#include "model.h"

namespace paceline {
namespace {

// with more, too many panels are computed again, one row after the other
constexpr int64_t kScreenRows = 2;
constexpr float kDeviations = 6.0f;
// of its own standard deviations, what a group of columns can leave out at most (Cauchy and Schwarz)
constexpr float kGroupDeviations = 8.0f;
static_assert(kActGroup == 64);
// panels computed in full before the whole product takes less
constexpr int64_t kMostPanels = 128;
// capped logits are this much beside the cap's own curve at most, so a larger one may come out below a smaller one
constexpr float kCapError = 5e-7f;
// smaller vocabularies are not worth a second pass
constexpr int64_t kLeastVocab = 1024;
// panels with unusual rows, computed in full each time, before screening is not worth its while
constexpr int64_t kMostUnusual = kMostPanels / 4;

// How often each lower half occurs among `columns`.
struct Counts {
  int32_t of[16] = {};
  int32_t columns = 0;

  // sum of (lower half - 7.5) squared
  float squares() const {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += of[i] * (2 * i - 15) * (2 * i - 15);
    return 0.25f * float(sum);
  }

  // Unlike random numbers from 0 to 15: mean or mean square about 7.5 more than 6 standard errors from
  // 0 and 21.25 (single numbers have deviations of sqrt(21.25) and sqrt(357)), or chi-squared, of 15
  // degrees of freedom, above 60, as with 8 values or fewer in a group. Of a million random groups none
  // or one is.
  bool unusual() const {
    const float n = float(columns);
    float sum = 0, chi = 0;
    for (int i = 0; i < 16; ++i) {
      const float more = float(of[i]) - n / 16;
      sum += float(of[i]) * (float(i) - 7.5f);
      chi += more * more;
    }
    const float spread = squares() - 21.25f * n;
    return sum * sum > 36 * 21.25f * n || spread * spread > 36 * 357.0f * n || chi > 60 * n / 16;
  }
};

}  // namespace

void Model::reserve_screen() {
  if (!config_.screens || head_.parts.empty()) return;
  const Panels head = head_.parts[0].view();
  if ( head_.parts[0].kind() != Weights::kI8 || head.columns % kActGroup != 0 || head.rows < kLeastVocab) return;
  screen_ = head;
  screen_.panel_bytes = head.panel_bytes / 2;
  screen_.data = arena_.take(size_t(head_.parts[0].panel_count() * screen_.panel_bytes));
  doubts_.resize(size_t(head_.parts[0].panel_count()) * kPanel);
}

void Model::make_screen() {
  if (!screen_.data) return;
  const Panels head = head_.parts[0].view();
  uint8_t* halves = const_cast<uint8_t*>(screen_.data);
  std::atomic<int64_t> unusual_panels{0};
  team_.run([&](int member) {
    team_.each(member, head_.parts[0].panel_count(), 16, [&](int64_t panel) {
      const uint8_t* in = head.data + panel * head.panel_bytes;
      uint8_t* out = halves + panel * screen_.panel_bytes;
      // 16 units of 128 bytes are the 64 columns of a group
      for (int64_t group = 0; group < head.columns / kActGroup; ++group, in += 2048, out += 1024)
        for (int i = 0; i < 1024; ++i) out[i] = uint8_t((in[i] >> 4) | (in[i + 1024] & 0xf0));
      unusual_panels += measure(panel);
    });
  });
  if (unusual_panels > kMostUnusual) screen_.data = nullptr;
}

// Sets the doubts of a panel's rows; whether one of them is unusual.
bool Model::measure(int64_t panel) {
  const Panels head = head_.parts[0].view();
  const uint8_t* in = head.data + panel * head.panel_bytes;
  const int32_t columns = int32_t(head.columns);
  float* doubts = doubts_.data() + panel * kPanel;
  Counts rows[kPanel];
  bool unusual[kPanel] = {}, any = false;
  for (int32_t column = 0; column < columns; column += kActGroup) {
    // a unit is 4 columns of each row
    uint8_t counts[kPanel][16] = {};
    for (int unit = 0; unit < kActGroup / 4; ++unit)
      for (int lane = 0; lane < kPanel; ++lane)
        for (int i = 0; i < 4; ++i) ++counts[lane][*in++ & 15];
    for (int lane = 0; lane < kPanel; ++lane) {
      Counts group;
      group.columns = kActGroup;
      for (int i = 0; i < 16; ++i) {
        group.of[i] = counts[lane][i];
        rows[lane].of[i] += counts[lane][i];
      }
      unusual[lane] = unusual[lane] || group.unusual();
    }
  }
  for (int lane = 0; lane < kPanel; ++lane) {
    rows[lane].columns = columns;
    const float scale = head.scale[panel * kPanel + lane];
    doubts[lane] = scale * std::sqrt(rows[lane].squares() / float(columns));
    // rows of zeros, and those that fill up the last panel, leave nothing out
    any = any || (scale != 0 && (unusual[lane] || rows[lane].unusual()));
  }
  // not infinity, which times an x of zeros is not a number
  if (any) std::fill_n(doubts, kPanel, FLT_MAX);
  return any;
}

bool Model::screens(const PacelineStep& step) const {
  return !step.logits && screen_.data && step.sampled <= kScreenRows;
}

void Model::reserve_choice(const PacelineStep& step) {
  if (step.logits) return;
  const size_t rows = size_t(step.sampled), bytes = rows * size_t(config_.vocab) * 4;
  logits_.reserve(bytes);
  if (!screens(step)) return;
  screened_.reserve(bytes);
  settled_.resize(rows);
  limits_.resize(size_t(team_.size()));
  candidates_.resize(size_t(team_.size()));
  for (std::vector<float>& limits : limits_) limits.resize(size_t(head_.parts[0].panel_count()));
  for (std::vector<int32_t>& candidates : candidates_) candidates.reserve(size_t(head_.parts[0].panel_count()));
}

void Model::choose(int member, const Share& share, const PacelineStep& step) {
  const int64_t vocab = config_.vocab, panels = head_.parts[0].panel_count(), rows = share.rows;
  GemmArgs head = product_of(share, head_), halves = head;
  float* logits = reinterpret_cast<float*>(logits_.data());
  head.out = logits;
  halves.w = screen_;
  halves.out = screened_.data();
  head.out_stride = halves.out_stride = vocab;
  constexpr int64_t grain = 16;
  team_.each(member, panels, grain, [&](int64_t panel) { kernels_->screen(halves, 0, rows, panel); });
  team_.each(member, rows, 1, [&](int64_t row) {
    settled_[size_t(row)] = settle(member, head, row, step.likeliest + row);
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (member == 0) ++choices_[settled_[size_t(row)] ? kSettled : kTooMany];
    if (settled_[size_t(row)]) continue;
    team_.each(member, panels, grain, [&](int64_t panel) { kernels_->gemm[int(Weights::kI8)](head, row, row + 1, panel); });
    if (member != 0) continue;
    if (config_.logits_softcap > 0) kernels_->cap_logits(logits + row * vocab, vocab, config_.logits_softcap);
    step.likeliest[row] = kernels_->likeliest(logits + row * vocab, vocab);
  }
}

// Whether the likeliest token of a row was found without the whole product; -1 as in PacelineStep.
bool Model::settle(int member, const GemmArgs& head, int64_t row, int32_t* likeliest) {
  const int64_t vocab = config_.vocab, columns = config_.hidden, groups = columns / kActGroup;
  const float* screened = reinterpret_cast<const float*>(screened_.data()) + row * vocab;
  float* exact = static_cast<float*>(head.out) + row * vocab;
  const float cap = config_.logits_softcap;
  const int32_t first = kernels_->likeliest(screened, vocab);
  *likeliest = first;
  if (first < 0) return true;

  const int8_t* x = reinterpret_cast<const int8_t*>(head.a) + row * head.a_stride;
  const float* x_scale = head.a_scale + row * (groups + 1);
  float square = 0, largest = 0;
  for (int64_t group = 0; group < groups; ++group) {
    int32_t sum = 0;
    for (int64_t i = group * kActGroup; i < (group + 1) * kActGroup; ++i) sum += int32_t(x[i]) * x[i];
    const float of_group = x_scale[group] * x_scale[group] * float(sum);
    square += of_group;
    largest = std::max(largest, of_group);
  }
  const float away = std::max(kDeviations * std::sqrt(square), kGroupDeviations * std::sqrt(largest));

  // computes a panel in full; the first of the largest logits so far
  float best = 0;
  *likeliest = -1;
  auto look = [&](int64_t panel) {
    kernels_->gemm[int(Weights::kI8)](head, row, row + 1, panel);
    const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, vocab);
    if (cap > 0) kernels_->cap_logits(exact + begin, end - begin, cap);
    for (int64_t i = begin; i < end; ++i) {
      if (*likeliest >= 0 && (exact[i] < best || (exact[i] == best && i > *likeliest))) continue;
      best = exact[i];
      *likeliest = int32_t(i);
    }
  };
  look(first / kPanel);
  float* limits = limits_[size_t(member)].data();
  // with room for all panels
  std::vector<int32_t>& others = candidates_[size_t(member)];
  others.clear();
  const int64_t panels = (vocab + kPanel - 1) / kPanel;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, vocab);
    float most = screened[begin] + away * doubts_[size_t(begin)];
    for (int64_t i = begin + 1; i < end; ++i) most = std::max(most, screened[i] + away * doubts_[size_t(i)]);
    limits[panel] = std::min(most, FLT_MAX);
  }
  if (cap > 0) {
    kernels_->cap_logits(limits, panels, cap);
    // as far up as both a limit and a logit below it may be off
    for (int64_t panel = 0; panel < panels; ++panel) limits[panel] += 2 * kCapError * std::fabs(limits[panel]);
  }
  for (int64_t panel = 0; panel < panels; ++panel)
    if (limits[panel] >= best && panel != first / kPanel) others.push_back(int32_t(panel));
  // the most promising on top
  auto less = [&](int32_t a, int32_t b) { return limits[a] < limits[b]; };
  std::make_heap(others.begin(), others.end(), less);
  for (int64_t looked = 0; !others.empty() && limits[others.front()] >= best; ++looked) {
    if (looked == kMostPanels) return false;
    look(others.front());
    std::pop_heap(others.begin(), others.end(), less);
    others.pop_back();
  }
  return true;
}

}  // namespace paceline
