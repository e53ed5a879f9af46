// Tokens from logits: one a row, by temperature, top_k, top_p, min_p and a uniform number.
//
// Nothing is sorted. A row without filters is weighed once, in chunks; the cumulative distribution
// passes the uniform number in one of them, which is weighed again. A row with filters is walked from
// its likeliest token on. Its few hundred largest logits are enough for most settings, and found
// through the largest of every group of them. What they do not decide is decided over all weights,
// by bisecting for the weight at which the running sum passes a number: a pass over the row for a bit.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "paceline_native.h"
#include "pool.h"

namespace paceline {

// One member's
struct SampleScratch {
  Memory masked;        // a row's logits
  Memory weights;       // of a whole row
  Memory tops, sums;    // of a row's groups and chunks
  Memory candidates;    // logits
  Memory some_weights;  // of the candidates, or of one chunk
  Memory places;        // of the candidates
};

// Keeps scratch memory from call to call; used from one thread at a time.
class Sampler {
 public:
  // Rows are shared among the team; null: the calling thread takes all. A row's result depends on that
  // row and on the kernels alone. Throw std::invalid_argument; then nothing was written.
  void draw(const Kernels& kernels, Team* team, const PacelineDraw& draw);
  void logprobs(const Kernels& kernels, Team* team, const PacelineLogprobs& logprobs);

 private:
  void reserve(Team* team, int64_t vocab);

  std::vector<SampleScratch> scratch_;
};

}  // namespace paceline
