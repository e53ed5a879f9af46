#include "pool.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

// A barrier inside a step is usually short of company for microseconds. Past that the missing member
// may be waiting for this very processor, so it is offered, and in the end slept away from. A longer
// spin gains nothing on an idle machine, and doubles a step's time where another process takes one of
// two processors.
constexpr int kSpins = 100;
// Between steps the processor is left to whoever makes the next plan.
constexpr int kIdleYields = 0;

constexpr uint32_t kOneRun = 1u << 16, kMembers = kOneRun - 1;

// A share of lost time is believed the second time in a row: a hypervisor that stops everything once is no neighbour.
constexpr int kWindows = 2;
// of the share at which one member fewer is as quick; and below the second one nobody is sent to rest
constexpr double kClearly = 1.2, kLeastShare = 0.15;
// Runs of fewer barriers lose no more than the time that was taken from them.
constexpr unsigned kFewBarriers = 8;
// seconds that waking up may take
constexpr double kPrompt = 200e-6;
// A member that looks for a processor must have had one for this share of the time: a neighbour that never sleeps
// leaves it a half.
constexpr double kFree = 0.75;

// of the calling thread, since its run began, asleep while it waited for the others
thread_local double slept = 0;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// seconds for which the calling thread has been on a processor
double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns once `value` is no longer `old`.
template <class T>
void wait_change(const std::atomic<T>& value, T old, int yields) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  for (int i = 0; i < yields; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  }
  if (value.load(std::memory_order_acquire) != old) return;
  const double began = seconds_now();
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  slept += seconds_now() - began;
}

}  // namespace

bool Contention::add(int members, double seconds, double lost) {
  seconds_ += seconds;
  lost_ += lost;
  if (seconds_ < window_) return false;
  const double share = lost_ / seconds_;
  seconds_ = lost_ = 0;
  windows_ = share > std::max(kClearly / members, kLeastShare) ? windows_ + 1 : 0;
  if (windows_ < kWindows) return false;
  windows_ = 0;
  return true;
}

Team::Team(int threads, const RestTimes& times)
    : shares_(size_t(threads)), members_(threads), times_(times), contention_(times.window), pause_(times.pause) {
  start(threads);
}

void Team::start(int threads) {
  threads_.reserve(size_t(threads - 1));
  try {
    const uint32_t run = job_.load();
    for (int member = 1; member < threads; ++member)
      threads_.emplace_back([this, member, run] { serve(member, run); });
  } catch (const std::exception& error) {
    const size_t started = threads_.size();
    // threads that nobody has joined end the process when they are destroyed
    stop();
    throw std::runtime_error("could start only " + std::to_string(started) + " threads beside the caller's, not " +
                             std::to_string(threads - 1) + ": " + error.what());
  }
}

void Team::renew() {
  const int threads = int(threads_.size()) + 1;
  stop();
  stop_.store(false);
  start(threads);
}

Team::~Team() { stop(); }

void Team::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  recall_.notify_all();
  job_.fetch_add(kOneRun);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  // each is joined once, also where new ones could not be started and the team ends
  threads_.clear();
}

double Team::pause(int member, void (*f)()) {
  double taken = 0;
  if (member == 0) {
    const double began = seconds_now();
    f();
    taken = seconds_now() - began;
    // it is no part of the run, and no neighbour was in the way
    slept += taken;
    began_ += taken;
  }
  meet(0);
  return taken;
}

void Team::meet(int yields) {
  const int members = size();
  if (members == 1) return;
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    for (Share& share : shares_) share.taken.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  } else {
    wait_change(generation_, generation, yields);
  }
}

void Team::run(const std::function<void(int)>& body) {
  if (threads_.empty()) return body(0);
  body_ = &body;
  const int members = size();
  const unsigned barriers = unsigned(generation_.load(std::memory_order_relaxed));
  began_ = seconds_now();
  // whoever rests is told too, so that it looks for a processor only while there is something to compute
  const uint32_t runs = job_.load(std::memory_order_relaxed) / kOneRun;
  job_.store((runs + 1) * kOneRun + uint32_t(members), std::memory_order_release);
  job_.notify_all();
  work(0);
  barrier();
  if (members == 1 || unsigned(generation_.load(std::memory_order_relaxed)) - barriers >= kFewBarriers)
    look(members, seconds_now() - began_);
}

void Team::work(int member) {
  const double began = seconds_now(), ran = processor_seconds();
  slept = 0;
  (*body_)(member);
  const double off = seconds_now() - began - (processor_seconds() - ran) - slept, late = began - began_ - kPrompt;
  shares_[size_t(member)].lost = std::max(off, 0.0) + std::max(late, 0.0);
}

void Team::look(int members, double seconds) {
  if (offer_.exchange(-1, std::memory_order_acq_rel) == members) {
    returned_ = seconds_now();
    contention_ = Contention(times_.window);
    return resize(members + 1);
  }
  double lost = 0;
  for (int member = 0; member < members; ++member) lost = std::max(lost, shares_[size_t(member)].lost);
  if (members == 1 || !contention_.add(members, seconds, lost)) return;
  const bool again = seconds_now() - returned_ < times_.settled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pause_ = again ? std::min(2 * pause_, times_.longest) : times_.pause;
  }
  resize(members - 1);
}

void Team::resize(int members) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    members_.store(members, std::memory_order_relaxed);
  }
  recall_.notify_all();
}

void Team::serve(int member, uint32_t run) {
  wait_change(job_, run, kIdleYields);
  for (run = job_.load(std::memory_order_acquire); !stop_.load();) {
    if (leaves_out(run, member)) {
      run = rest(member);
      continue;
    }
    work(member);
    barrier();
    wait_change(job_, run, kIdleYields);
    run = job_.load(std::memory_order_acquire);
  }
}

bool Team::leaves_out(uint32_t run, int member) { return member >= int(run & kMembers); }

uint32_t Team::rest(int member) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    recall_.wait_for(lock, std::chrono::duration<double>(pause_), [&] { return called(member); });
  }
  // Other runs went by meanwhile. The last of them may have this member again, and then waits for it. One that leaves
  // it out may be over for long, so the next one is waited for: a processor is looked for while there is work
  const uint32_t run = job_.load(std::memory_order_acquire);
  if (stop_.load() || !leaves_out(run, member)) return run;
  wait_change(job_, run, kIdleYields);
  // else it is another one's turn to come back
  if (member == size() && finds_processor(member)) offer_.store(member, std::memory_order_release);
  return job_.load(std::memory_order_acquire);
}

bool Team::finds_processor(int member) const {
  const double began = seconds_now(), ran = processor_seconds();
  for (double now = began; now - began < times_.look; now = seconds_now()) {
    if (called(member)) return false;
    for (int i = 0; i < kSpins; ++i) relax();
  }
  return processor_seconds() - ran >= kFree * times_.look;
}

}  // namespace paceline
