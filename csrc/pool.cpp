#include "pool.h"

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
constexpr int kYields = 2000;
// Between steps the processor is left to whoever makes the next plan.
constexpr int kIdleYields = 0;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns once `value` is no longer `old`.
void wait_change(const std::atomic<int>& value, int old, int yields) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  for (int i = 0; i < yields; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int threads) : size_(threads), shares_(size_t(threads)) {
  threads_.reserve(size_t(size_ - 1));
  try {
    for (int member = 1; member < size_; ++member)
      threads_.emplace_back([this, member] { serve(member); });
  } catch (const std::exception& error) {
    // threads that nobody has joined end the process when they are destroyed
    stop();
    throw std::runtime_error("could start only " + std::to_string(threads_.size()) + " threads beside the caller's, not " +
                             std::to_string(size_ - 1) + ": " + error.what());
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stop_.store(true);
  job_.fetch_add(1);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::barrier() {
  if (size_ == 1) return;
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    for (Share& share : shares_) share.taken.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  } else {
    wait_change(generation_, generation, kYields);
  }
}

void Team::run(const std::function<void(int)>& body) {
  body_ = &body;
  if (size_ > 1) {
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }
  body(0);
  barrier();
}

void Team::serve(int member) {
  for (int seen = 0;;) {
    wait_change(job_, seen, kIdleYields);
    seen = job_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    (*body_)(member);
    barrier();
  }
}

}  // namespace paceline
