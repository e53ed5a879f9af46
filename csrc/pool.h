// A fixed team of threads that walks through one step together.
//
// `run` wakes the team once; inside, `Team::each` deals out items and `Team::barrier` joins, so a
// whole model step costs one wake-up. The calling thread is member 0.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace paceline {

class Team {
 public:
  // threads >= 1; `threads - 1` are started. Throws std::runtime_error where the system grants fewer
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls body(member) once on every member and returns when all have returned. Not reentrant. The body
  // must not throw, so it takes no memory: the others would wait for a member that is gone.
  void run(const std::function<void(int)>& body);

  // Inside run, called by every member with its number: calls f(item) once for every item of
  // [0, count), and returns on all members once all are done. A member works through its own
  // contiguous share, `grain` at a time, so that it streams through memory; then it helps the others.
  template <class F>
  void each(int member, int64_t count, int64_t grain, F&& f) {
    if (size_ == 1) {
      for (int64_t i = 0; i < count; ++i) f(i);
      return;
    }
    for (int k = 0; k < size_; ++k) {
      const int owner = member + k < size_ ? member + k : member + k - size_;
      const int64_t first = count * owner / size_, last = count * (owner + 1) / size_;
      std::atomic<int64_t>& taken = shares_[size_t(owner)].taken;
      while (taken.load(std::memory_order_relaxed) < last - first) {
        const int64_t begin = first + taken.fetch_add(grain, std::memory_order_relaxed);
        const int64_t end = begin + grain < last ? begin + grain : last;
        for (int64_t i = begin; i < end; ++i) f(i);
      }
    }
    barrier();
  }

  // Waits for every member, and makes the shares whole again for the next deal.
  void barrier();

 private:
  // ends and joins the threads
  void stop();
  void serve(int member);

  int size_;
  const std::function<void(int)>* body_ = nullptr;
  std::vector<std::thread> threads_;
  struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
  };
  std::vector<Share> shares_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> job_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace paceline
