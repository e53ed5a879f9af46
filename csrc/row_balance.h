// How rows are shared out among members whose processors are not alike.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace paceline {

// Where each member of a team works on rows of its own, all wait for the last. So a member that took longer than the
// others gets fewer rows in the next step, and one that took less gets more: cores of different kinds, or one that
// another process uses for a part of the time. It is times that are made equal, not rows a second: where members wait
// for memory, fewer rows take no less time. Knows no threads and no clock.
class Paces {
 public:
  explicit Paces(int members) : told_(size_t(members)), weights_(size_t(members), 1.0) {}

  // Of a member, in a step: seconds that it worked on rows of its own.
  void tell(int member, double seconds) { told_[size_t(member)].seconds = seconds; }

  // Between two steps, by one thread: takes in what the first `members` told. Nothing, where one told nothing.
  void settle(int members) {
    double sum = 0, least = 1;
    for (int i = 0; i < members; ++i) {
      sum += told_[size_t(i)].seconds;
      least = std::min(least, told_[size_t(i)].seconds);
    }
    if (least <= 0) return;
    double all = 0;
    for (int i = 0; i < members; ++i) {
      double& weight = weights_[size_t(i)];
      double& seconds = told_[size_t(i)].seconds;
      // one step in which a member was stopped is no reason to leave it nothing
      const double ratio = std::clamp(sum / members / seconds, 0.5, 2.0);
      weight = std::clamp(std::pow(weight * std::pow(ratio, kGain), 1 - kForget), kLeast, 1 / kLeast);
      all += weight;
      seconds = 0;
    }
    for (int i = 0; i < members; ++i) weights_[size_t(i)] *= members / all;
  }

  // The first row of a member, where the first `members` share `rows`; that of one beyond them is `rows`.
  int64_t begin(int member, int members, int64_t rows) const {
    const auto first = weights_.begin(), last = first + members;
    const auto [least, most] = std::minmax_element(first, last);
    // what differs by chance is as good as equal, and tiles are whole
    if (*most < kAlike * *least || member == members) return rows * member / members;
    double before = 0, all = 0;
    for (int i = 0; i < members; ++i) {
      all += weights_[size_t(i)];
      if (i < member) before += weights_[size_t(i)];
    }
    return std::llround(double(rows) * before / all);
  }

 private:
  // of a difference, what a step makes up for; and of what was learnt, what it forgets: without that, chance would add up
  static constexpr double kGain = 0.1, kForget = 0.005;
  static constexpr double kLeast = 0.125, kAlike = 1.15;
  struct alignas(64) Told {
    double seconds = 0;
  };
  std::vector<Told> told_;
  std::vector<double> weights_;
};

}  // namespace paceline
