// A team of threads that walks through one step together.
//
// `run` wakes the team once; inside, `Team::each` deals out items and `Team::barrier` joins, so a
// whole model step costs one wake-up. The calling thread is member 0.
//
// At every barrier all wait for the member whose processor another process uses. So members that are in
// the way for long are sent to rest, the last first, and come back once a processor is free for them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// Whether a team does better with one member fewer. A team of n members of which one is kept from its
// processor for a share of the time takes 1 / (1 - share) times as long as it would undisturbed, a team of
// n - 1 takes n / (n - 1) times: equal at a share of 1 / n. Knows no threads and no clock.
class Contention {
 public:
  // `window`: seconds over which a share is taken
  explicit Contention(double window) : window_(window) {}
  // Told of every run: its seconds, and for how many of them the member that was kept from its processor
  // longest was so. True: let one go, and begin anew.
  bool add(int members, double seconds, double lost);

 private:
  double window_, seconds_ = 0, lost_ = 0;
  int windows_ = 0;
};

// Seconds after which a team does something about a member that is in the way.
struct RestTimes {
  // over which a share of lost time is taken
  double window = 0.1;
  // of rest: at first, and at most; twice as many each time that a member is sent back within `settled` of its return
  double pause = 1, longest = 16, settled = 10;
  // of computing nothing, to find out whether a processor is free
  double look = 0.02;
};

class Team {
 public:
  // threads >= 1; `threads - 1` are started. Throws std::runtime_error where the system grants fewer
  explicit Team(int threads, const RestTimes& times = {});
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // members of the next run, 1 to `threads`; changes at the end of a run only
  int size() const { return members_.load(std::memory_order_relaxed); }

  // Calls body(member) once on every member and returns when all have returned. Not reentrant. The body
  // must not throw, so it takes no memory: the others would wait for a member that is gone.
  void run(const std::function<void(int)>& body);

  // Replaces the threads by new ones, which have the priority of the calling thread. Between runs. Throws as the
  // constructor does.
  void renew();

  // Inside run, called by every member with its number: calls f(item) once for every item of
  // [0, count), and returns on all members once all are done. A member works through its own
  // contiguous share, `grain` at a time, so that it streams through memory; then it helps the others.
  template <class F>
  void each(int member, int64_t count, int64_t grain, F&& f) {
    const int members = size();
    if (members == 1) {
      for (int64_t i = 0; i < count; ++i) f(i);
      return;
    }
    for (int k = 0; k < members; ++k) {
      const int owner = member + k < members ? member + k : member + k - members;
      const int64_t first = count * owner / members, last = count * (owner + 1) / members;
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
  void barrier() { meet(kYields); }

  // Inside run, called by every member right behind a barrier: calls f() on member 0 while the others sleep. Returns
  // the seconds that it took, to member 0.
  double pause(int member, void (*f)());

 private:
  // offers of a processor to others at a barrier before a member sleeps
  static constexpr int kYields = 2000;
  void meet(int yields);
  void start(int threads);
  // ends and joins the threads
  void stop();
  // `run`: what job_ is until the first run
  void serve(int member, uint32_t run);
  void work(int member);
  // whether a member has no part in what job_ was
  static bool leaves_out(uint32_t run, int member);
  // of a member that a run has left out: returns what job_ is once it may have that member again, or at the end
  uint32_t rest(int member);
  // whether a member that rests is to return at once
  bool called(int member) const { return stop_.load() || member < size(); }
  // by computing nothing for a while; no, where it is called meanwhile
  bool finds_processor(int member) const;
  // after a run
  void look(int members, double seconds);
  void resize(int members);

  struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
    // seconds of the last run for which the member was kept from its processor
    double lost = 0;
  };
  const std::function<void(int)>* body_ = nullptr;
  // when the run began
  double began_ = 0;
  std::vector<std::thread> threads_;
  std::vector<Share> shares_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
  // the number of the run in the upper half, how many members it has in the lower
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<int> members_;
  std::atomic<bool> stop_{false};
  // the resting member that found a processor free, or -1
  std::atomic<int> offer_{-1};
  const RestTimes times_;
  Contention contention_;
  // when a member came back last, and how long one rests before it looks for a processor
  double returned_ = 0, pause_;
  std::mutex mutex_;
  std::condition_variable recall_;
};

}  // namespace paceline
