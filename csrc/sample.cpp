#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "convert.h"

namespace paceline {
namespace {

// So many of a row's largest logits decide most draws, and are worth being looked at apart in rows of at
// least so many. More than kMost of them (equal logits) are not.
constexpr int64_t kWanted = 256;
constexpr int64_t kWorthwhile = 4096;
constexpr int64_t kMost = 1024;
static_assert(kMost >= kWeighChunk && kMost >= 2 * kWanted);
// so few weights are sorted rather than divided further
constexpr int64_t kFew = 32;
constexpr int64_t kMostLikeliest = 64;
// temperatures below leave the likeliest tokens alone as much as this one does
constexpr double kColdest = 1e-30;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// numbers that compare as the floats do, of any sign
uint32_t to_key(float x) {
  const uint32_t bits = to_bits(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_key(uint32_t key) { return from_bits(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The largest t that bisection finds with `least` to `most` of the floats at or above it; fewer than
// `least` are not accepted, more are where equal floats allow nothing else. `high`: the largest float.
float threshold(const Kernels& kernels, const float* x, int64_t n, float high, int64_t least, int64_t most) {
  uint32_t below = to_key(-std::numeric_limits<float>::max()), above = to_key(high) + 1;
  while (above - below > 1) {
    const uint32_t middle = below + (above - below) / 2;
    double sum;
    int64_t count;
    kernels.at_least(x, n, from_key(middle), &sum, &count);
    if (count < least) {
      above = middle;
    } else {
      below = middle;
      if (count <= most) break;
    }
  }
  return from_key(below);
}

// Weights in the order of a draw: the largest first, equal ones by their place.
struct Weights {
  const Kernels& kernels;
  const float* w;
  int64_t n;
  // memory for kMost of them and their places
  float* some;
  int32_t* places;
};

struct Found {
  int32_t place = 0;
  float weight = 0;
  double sum = 0;  // of the weights up to and including this one

  bool after(const Found& other) const {
    return weight < other.weight || (weight == other.weight && place > other.place);
  }
};

enum class Goal { kExceed, kReach, kCount };

// The first weight with which the running sum exceeds or reaches the goal, or with which that many are
// counted. The last above zero where rounding, or a goal too large, leads past it. There is one above
// zero: the likeliest token's weight is 1. `guess`: a weight that is probably somewhat less; 0: none.
Found find(const Weights& all, Goal kind, double goal, float guess) {
  auto done = [&](double passed, int64_t count) {
    return kind == Goal::kExceed ? passed > goal : kind == Goal::kReach ? passed >= goal : double(count) >= goal;
  };
  const float* w = all.w;
  int64_t n = all.n;
  const int32_t* places = nullptr;
  // Weights of [from_bits(low), from_bits(high)) remain, and come after `above` others with this sum. The
  // first `gone` of those are no longer among the n.
  uint32_t low = to_bits(std::numeric_limits<float>::min()), high = to_bits(1.0f) + 1;
  double sum = 0, gone_sum = 0, middle_sum;
  int64_t above = 0, gone = 0, remaining, count;
  // all that is above `low` must reach the goal, by the sums that are compared from here on
  auto expect_end = [&] {
    all.kernels.at_least(w, n, from_bits(low), &middle_sum, &count);
    remaining = gone + count - above;
    if (done(gone_sum + middle_sum, gone + count)) return;
    kind = Goal::kCount;
    goal = double(gone + count);
  };
  expect_end();
  uint32_t next = to_bits(guess);
  while (remaining > kFew && high - low > 1) {
    if (!places && remaining <= kMost && n > 2 * kMost) {
      all.kernels.collect(w, n, from_bits(low), from_bits(high), kMost, all.places);
      for (int64_t i = 0; i < remaining; ++i) all.some[i] = w[all.places[i]];
      places = all.places;
      w = all.some;
      n = remaining;
      gone = above;
      gone_sum = sum;
      expect_end();
    }
    const uint32_t middle = next > low && next < high ? next : low + (high - low) / 2;
    next = 0;
    all.kernels.at_least(w, n, from_bits(middle), &middle_sum, &count);
    middle_sum += gone_sum;
    count += gone;
    if (done(middle_sum, count)) {
      low = middle;
      remaining = count - above;
    } else {
      high = middle;
      remaining -= count - above;
      above = count;
      sum = middle_sum;
    }
  }
  Found last;
  auto walk = [&](int64_t i) {
    last.place = places ? places[i] : int32_t(i);
    last.weight = w[i];
    sum += double(w[i]);
    last.sum = sum;
    return done(sum, ++above);
  };
  if (high - low == 1) {
    // equal weights, in the order of their places
    for (int64_t i = 0; i < n; ++i)
      if (w[i] == from_bits(low) && walk(i)) break;
    return last;
  }
  int32_t few[kFew];
  count = all.kernels.collect(w, n, from_bits(low), from_bits(high), kFew, few);
  std::sort(few, few + count, [&](int32_t a, int32_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); });
  for (int64_t i = 0; i < count; ++i)
    if (walk(few[i])) break;
  return last;
}

struct Filters {
  int64_t top_k;  // 0: any number
  double top_p;
  float min_p;
  double uniform;

  bool keep_all() const { return top_k == 0 && top_p >= 1.0 && min_p == 0.0f; }
};

// One draw; total: the sum of all weights, not used with top_k.
int32_t choose(const Weights& weights, const Filters& filters, double total) {
  Found last;
  last.place = std::numeric_limits<int32_t>::max();
  double kept = total;
  // what is left after a goal is at most n times the weight with which the sum passes it
  const double share = 0.999 / double(weights.n);
  if (filters.top_k > 0) {
    last = find(weights, Goal::kCount, double(filters.top_k), 0);
    kept = last.sum;
  }
  if (filters.top_p < 1.0) {
    const double goal = filters.top_p * kept;
    const Found end = find(weights, Goal::kReach, goal, std::max(last.weight, float((kept - goal) * share)));
    if (last.after(end)) last = end;
    kept = std::min(kept, end.sum);
  }
  const double goal = filters.uniform * kept;
  const Found found = find(weights, Goal::kExceed, goal, std::max(last.weight, float((kept - goal) * share)));
  return found.after(last) ? last.place : found.place;
}

void refuse_sizes(int64_t rows, int64_t vocab) {
  if (rows < 0 || vocab < 1 || vocab > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("cannot sample " + std::to_string(rows) + " rows of " + std::to_string(vocab) +
                                " logits");
}

int64_t chunks_of(int64_t vocab) { return (vocab + kWeighChunk - 1) / kWeighChunk; }

double sum_of(const float* sums, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += double(sums[i]);
  return total;
}

float* floats(const Memory& memory) { return reinterpret_cast<float*>(memory.data()); }
int32_t* integers(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.data()); }

// f(member, row) for every row
template <class F>
void each_row(Team* team, int64_t rows, F&& f) {
  if (!team || rows < 2) {
    // not worth waking anybody
    for (int64_t row = 0; row < rows; ++row) f(0, row);
    return;
  }
  team->run([&](int member) { team->each(member, rows, 1, [&](int64_t row) { f(member, row); }); });
}

struct Row {
  const float* x;
  int64_t vocab;
};

Exponent exponent_of(float best, double temperature) {
  const double factor = 1.4426950408889634 / std::max(temperature, kColdest);
  Exponent e;
  e.best = best;
  e.high = float(factor);
  e.low = float(factor - double(e.high));
  return e;
}

// in the order of the vocabulary
int32_t draw_from_all(const Kernels& kernels, const Row& row, const Exponent& e, double uniform, float* sums,
                      float* weights) {
  const int64_t chunks = chunks_of(row.vocab);
  kernels.weigh(row.x, row.vocab, e, 0.0f, nullptr, sums);
  const double goal = uniform * sum_of(sums, chunks);
  double before = 0, last_before = 0;
  int64_t chunk = 0;
  for (int64_t i = 0; i < chunks && before <= goal; ++i) {
    // rounding may lead past the end: then it is the last chunk with weight
    if (sums[i] > 0) {
      chunk = i;
      last_before = before;
    }
    before += double(sums[i]);
  }
  const int64_t begin = chunk * kWeighChunk, count = std::min(kWeighChunk, row.vocab - begin);
  kernels.weigh(row.x + begin, count, e, 0.0f, weights, nullptr);
  int64_t found = 0;
  double sum = last_before;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] == 0) continue;
    found = i;
    sum += double(weights[i]);
    if (sum > goal) break;
  }
  return int32_t(begin + found);
}

// The k likeliest tokens, equal ones in the order of the vocabulary; k <= kMostLikeliest. `places`: kMost.
// Where fewer are finite, the rest is token 0.
void find_likeliest(const Kernels& kernels, const Row& row, float best, int64_t k, float* tops, int32_t* places,
                    int32_t* out) {
  const int64_t n = row.vocab;
  float least = -std::numeric_limits<float>::max();
  if (n > kMost) {
    kernels.tops(row.x, n, tops);
    least = threshold(kernels, tops, 16 * chunks_of(n), best, k, 2 * k);
  }
  int64_t count = kernels.collect(row.x, n, least, kInfinity, kMost, places);
  if (count > kMost) {
    least = threshold(kernels, row.x, n, best, k, kMost);
    count = kernels.collect(row.x, n, least, kInfinity, kMost, places);
  }
  if (count > kMost) {
    // many equal ones: less than k are above them
    count = kernels.collect(row.x, n, std::nextafter(least, kInfinity), kInfinity, kMost, places);
    for (int64_t i = 0; i < n && count < k; ++i)
      if (row.x[i] == least) places[count++] = int32_t(i);
  }
  std::fill(out, out + k, 0);
  k = std::min(k, count);
  std::partial_sort(places, places + k, places + count, [&](int32_t a, int32_t b) {
    return row.x[a] > row.x[b] || (row.x[a] == row.x[b] && a < b);
  });
  std::copy(places, places + k, out);
}

// min_p, top_k, top_p and the draw, from the likeliest token on
int32_t draw_filtered(const Kernels& kernels, const SampleScratch& scratch, const Row& row, const Exponent& e,
                      const Filters& filters) {
  const int64_t n = row.vocab, chunks = chunks_of(n);
  float *sums = floats(scratch.sums), *weights = floats(scratch.weights), *some = floats(scratch.some_weights);
  int32_t* places = integers(scratch.places);
  int64_t count = kMost + 1;
  if (n >= kWorthwhile) {
    const int64_t wanted = filters.top_k > 0 ? std::min(filters.top_k, kWanted) : kWanted;
    float* tops = floats(scratch.tops);
    kernels.tops(row.x, n, tops);
    const float least = threshold(kernels, tops, 16 * chunks, e.best, wanted, 2 * wanted);
    count = kernels.collect(row.x, n, least, kInfinity, kMost, places);
  }
  double sum = 0;
  bool decided = false;
  if (count <= kMost) {
    float* candidates = floats(scratch.candidates);
    for (int64_t i = 0; i < count; ++i) candidates[i] = row.x[places[i]];
    kernels.weigh(candidates, count, e, filters.min_p, some, nullptr);
    int64_t kept;
    kernels.at_least(some, count, std::numeric_limits<float>::min(), &sum, &kept);
    // with a weight of nothing among them, all that have one are
    decided = kept < count || (filters.top_k > 0 && filters.top_k <= count);
  }
  double total = sum;
  if (!decided) {
    kernels.weigh(row.x, n, e, filters.min_p, weights, sums);
    total = sum_of(sums, chunks);
    if (filters.top_k == 0 && sum > 0)
      decided = filters.top_p < 1.0 ? sum >= filters.top_p * total : sum > filters.uniform * total;
  }
  // so few are not divided into places again
  if (decided) return places[choose({kernels, some, count, nullptr, nullptr}, filters, total)];
  return choose({kernels, weights, n, some, places}, filters, total);
}

}  // namespace

void Sampler::reserve(Team* team, int64_t vocab) {
  const size_t members = team ? size_t(team->size()) : 1;
  if (scratch_.size() < members) scratch_.resize(members);
  const size_t chunks = size_t(chunks_of(vocab));
  for (SampleScratch& scratch : scratch_) {
    scratch.masked.reserve(size_t(vocab) * 4);
    scratch.weights.reserve(size_t(vocab + 15) * 4);
    scratch.tops.reserve(chunks * 16 * 4);
    scratch.sums.reserve(chunks * 4);
    scratch.candidates.reserve(kMost * 4);
    scratch.some_weights.reserve(kMost * 4);
    scratch.places.reserve(kMost * 4);
  }
}

void Sampler::draw(const Kernels& kernels, Team* team, const PacelineDraw& draw) {
  refuse_sizes(draw.rows, draw.vocab);
  for (int64_t i = 0; i < draw.rows; ++i) {
    const bool usable = draw.temperature[i] >= 0 && draw.top_k[i] >= 0 && draw.top_p[i] > 0 && draw.top_p[i] <= 1 &&
                        draw.min_p[i] >= 0 && draw.min_p[i] <= 1 && draw.uniform[i] >= 0 && draw.uniform[i] < 1 &&
                        draw.likeliest[i] < draw.vocab;
    if (!usable)
      throw std::invalid_argument("row " + std::to_string(i) + " has temperature " +
                                  std::to_string(draw.temperature[i]) + ", top_k " + std::to_string(draw.top_k[i]) +
                                  ", top_p " + std::to_string(draw.top_p[i]) + ", min_p " +
                                  std::to_string(draw.min_p[i]) + ", uniform " + std::to_string(draw.uniform[i]) +
                                  " and likeliest token " + std::to_string(draw.likeliest[i]));
  }
  reserve(team, draw.vocab);
  each_row(team, draw.rows, [&](int member, int64_t i) {
    const SampleScratch& scratch = scratch_[size_t(member)];
    Row row{draw.logits[i], draw.vocab};
    const uint8_t* mask = draw.masks[i];
    int32_t likeliest = draw.likeliest[i];
    const bool known = likeliest >= 0 && !(mask && mask[likeliest]), greedy = draw.temperature[i] == 0.0;
    if (mask && !(known && greedy)) {
      kernels.masked(row.x, mask, row.vocab, floats(scratch.masked));
      row.x = floats(scratch.masked);
    }
    if (!known) likeliest = kernels.first_largest(row.x, row.vocab);
    draw.tokens[i] = likeliest;
    if (likeliest < 0 || greedy) return;
    const Exponent e = exponent_of(row.x[likeliest], draw.temperature[i]);
    // weights are float32: the least of them that is not below min_p
    float least = float(draw.min_p[i]);
    if (double(least) < draw.min_p[i]) least = std::nextafter(least, kInfinity);
    const Filters filters{draw.top_k[i], draw.top_p[i], least, draw.uniform[i]};
    draw.tokens[i] = filters.keep_all() ? draw_from_all(kernels, row, e, filters.uniform, floats(scratch.sums),
                                                        floats(scratch.some_weights))
                                        : draw_filtered(kernels, scratch, row, e, filters);
  });
}

void Sampler::logprobs(const Kernels& kernels, Team* team, const PacelineLogprobs& logprobs) {
  const PacelineLogprobs& l = logprobs;
  refuse_sizes(l.rows, l.vocab);
  if (l.count < 0 || l.count > l.vocab || l.count > kMostLikeliest)
    throw std::invalid_argument("cannot name the " + std::to_string(l.count) + " likeliest of " +
                                std::to_string(l.vocab) + " tokens, at most " + std::to_string(kMostLikeliest));
  for (int64_t i = 0; i < l.rows; ++i)
    if (l.tokens[i] < 0 || l.tokens[i] >= l.vocab)
      throw std::invalid_argument("tokens[" + std::to_string(i) + "] is " + std::to_string(l.tokens[i]) +
                                  ", the vocabulary has " + std::to_string(l.vocab));
  reserve(team, l.vocab);
  each_row(team, l.rows, [&](int member, int64_t i) {
    const SampleScratch& scratch = scratch_[size_t(member)];
    const Row row{l.logits[i], l.vocab};
    const int32_t likeliest = kernels.first_largest(row.x, row.vocab);
    const float best = likeliest >= 0 ? row.x[likeliest] : 0.0f, own = row.x[l.tokens[i]];
    float* sums = floats(scratch.sums);
    kernels.weigh(row.x, row.vocab, exponent_of(best, 1.0), 0.0f, nullptr, sums);
    const double log_total = double(best) + std::log(sum_of(sums, chunks_of(row.vocab)));
    l.own[i] = double(own) - log_total;
    double sum;
    int64_t larger;
    kernels.at_least(row.x, row.vocab, std::nextafter(own, kInfinity), &sum, &larger);
    l.ranks[i] = 1 + larger;
    int32_t* tokens = l.top_tokens + i * l.count;
    find_likeliest(kernels, row, best, l.count, floats(scratch.tops), integers(scratch.places), tokens);
    for (int64_t j = 0; j < l.count; ++j) l.top[i * l.count + j] = double(row.x[tokens[j]]) - log_total;
  });
}

}  // namespace paceline
