// Peaks of product instructions: zeros in registers times zeros in registers, in assembly, so that
// neither memory nor the compiler nor a mistake that the kernels make has a part in them.
//
// A chain of sums waits for its last product, so each loop has twelve (of floats) or eight (where a
// temporary takes registers): more than the latency times the rate of every processor known here. Where
// several instructions are needed for a product of bytes, the loop is the shortest exact sequence, since
// no kernel can do with less:
//   int8, without VNNI: 2 vpmaddubsw, vpaddw, vpmaddwd, vpaddd for 64 products in 256 bits
//   4 bits: 8 vpmaddubsw, 7 vpaddw, vpmaddwd, vpaddd for 256 (without unpacking them)
#include "ceiling.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "pool.h"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

#if defined(__x86_64__)

#define PL_ALL_REGISTERS \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14", "xmm15"
#define PL_LOOP(body)                                                                                   \
  __asm__ volatile("vzeroall\n1:\n" body "dec %0\njnz 1b\nvzeroupper\n" : "+r"(rounds) : : PL_ALL_REGISTERS, "cc")

// twelve sums in registers 0 to 11, factors in 12 and 13
#define PL_TWELVE(op, r)                                                                                   \
  op " %%" r "12, %%" r "13, %%" r "0\n" op " %%" r "12, %%" r "13, %%" r "1\n"                            \
  op " %%" r "12, %%" r "13, %%" r "2\n" op " %%" r "12, %%" r "13, %%" r "3\n"                            \
  op " %%" r "12, %%" r "13, %%" r "4\n" op " %%" r "12, %%" r "13, %%" r "5\n"                            \
  op " %%" r "12, %%" r "13, %%" r "6\n" op " %%" r "12, %%" r "13, %%" r "7\n"                            \
  op " %%" r "12, %%" r "13, %%" r "8\n" op " %%" r "12, %%" r "13, %%" r "9\n"                            \
  op " %%" r "12, %%" r "13, %%" r "10\n" op " %%" r "12, %%" r "13, %%" r "11\n"

void fma_256(int64_t rounds) { PL_LOOP(PL_TWELVE("vfmadd231ps", "ymm")); }
void fma_512(int64_t rounds) { PL_LOOP(PL_TWELVE("vfmadd231ps", "zmm")); }
void bf16_512(int64_t rounds) { PL_LOOP(PL_TWELVE("vdpbf16ps", "zmm")); }
void dots_512(int64_t rounds) { PL_LOOP(PL_TWELVE("vpdpbusd", "zmm")); }

// sums in registers 0 to 7, temporaries in 8 to 13, factors in 14 and 15
#define PL_BYTES(r, sum, t, u)                                                                          \
  "vpmaddubsw " r "14, " r "15, " r t "\nvpmaddubsw " r "14, " r "15, " r u "\n"                          \
  "vpaddw " r t ", " r u ", " r t "\nvpmaddwd " r t ", " r "15, " r t "\n"                                \
  "vpaddd " r t ", " r sum ", " r sum "\n"
#define PL_STEP(r, t, u) "vpmaddubsw " r "14, " r "15, " r u "\nvpaddw " r t ", " r u ", " r t "\n"
#define PL_STEPS(r, t, u)                                                                               \
  PL_STEP(r, t, u) PL_STEP(r, t, u) PL_STEP(r, t, u) PL_STEP(r, t, u) PL_STEP(r, t, u) PL_STEP(r, t, u) \
  PL_STEP(r, t, u)
#define PL_NIBBLES(r, sum, t, u)                                                                        \
  "vpmaddubsw " r "14, " r "15, " r t "\n" PL_STEPS(r, t, u)                                            \
  "vpmaddwd " r t ", " r "15, " r t "\nvpaddd " r t ", " r sum ", " r sum "\n"
#define PL_EIGHT(one, r)                                                                                \
  one(r, "0", "8", "9") one(r, "1", "10", "11") one(r, "2", "12", "13") one(r, "3", "8", "9")           \
  one(r, "4", "10", "11") one(r, "5", "12", "13") one(r, "6", "8", "9") one(r, "7", "10", "11")

#ifdef PL_AVXVNNI
void dots_256(int64_t rounds) { PL_LOOP(PL_TWELVE("%{vex%} vpdpbusd", "ymm")); }
constexpr PeakLoop kDots256{dots_256, 12 * 32};
#endif
void bytes_256(int64_t rounds) { PL_LOOP(PL_EIGHT(PL_BYTES, "%%ymm")); }
void nibbles_256(int64_t rounds) { PL_LOOP(PL_EIGHT(PL_NIBBLES, "%%ymm")); }
void bytes_512(int64_t rounds) { PL_LOOP(PL_EIGHT(PL_BYTES, "%%zmm")); }
void nibbles_512(int64_t rounds) { PL_LOOP(PL_EIGHT(PL_NIBBLES, "%%zmm")); }

constexpr PeakLoop kFma256{fma_256, 12 * 8}, kBytes256{bytes_256, 8 * 64}, kNibbles256{nibbles_256, 8 * 256};
constexpr PeakLoop kFma512{fma_512, 12 * 16}, kBytes512{bytes_512, 8 * 128}, kNibbles512{nibbles_512, 8 * 512};
constexpr PeakLoop kDots512{dots_512, 12 * 64}, kBf16512{bf16_512, 12 * 32};

#endif

}  // namespace

const PeakLoop* peak_loop(const char* variant, Weights weights) {
#if defined(__x86_64__)
  // the K kinds are unpacked to bytes
  const bool nibbles = weights == Weights::kQ4 || weights == Weights::kQ40;
  const bool bytes = weights == Weights::kI8 || weights >= Weights::kQ4K;
#ifdef PL_AVXVNNI
  if (!strcmp(variant, "avxvnni")) return bytes || nibbles ? &kDots256 : &kFma256;
#endif
  if (!strcmp(variant, "avx2")) return nibbles ? &kNibbles256 : bytes ? &kBytes256 : &kFma256;
  if (!strcmp(variant, "avx512bw")) return nibbles ? &kNibbles512 : bytes ? &kBytes512 : &kFma512;
  if (!strncmp(variant, "avx512", 6)) {
    if (bytes || nibbles) return &kDots512;
    return weights == Weights::kBF16 && !strcmp(variant, "avx512bf16") ? &kBf16512 : &kFma512;
  }
#else
  (void)variant, (void)weights;
#endif
  return nullptr;
}

double peak_rate(const char* variant, Weights weights, int threads) {
  const PeakLoop* loop = peak_loop(variant, weights);
  if (!loop) return 0;
  // a few milliseconds
  const int64_t rounds = 400'000'000 / loop->products;
  Team team(threads < 1 ? 1 : threads);
  double best = 0;
  // the first times also give the system time to spread the threads, and the clock to rise
  for (int i = 0; i < 12; ++i) {
    const auto began = Clock::now();
    team.run([&](int) { loop->run(rounds); });
    const double rate = double(rounds * loop->products * team.size()) / seconds_since(began);
    best = rate > best ? rate : best;
  }
  return best;
}

double read_seconds(const void* data, int64_t bytes, int threads, int repeat) {
  Team team(threads < 1 ? 1 : threads);
  const int64_t words = bytes / 8 / team.size();
  // small buffers are read over and over, or waking the threads would be what is timed
  const int64_t passes = bytes > 0 && bytes < (int64_t(128) << 20) ? (int64_t(128) << 20) / bytes : 1;
  std::atomic<uint64_t> sink{0};
  double best = -1;
  for (int i = 0; i < repeat; ++i) {
    const auto began = Clock::now();
    team.run([&](int member) {
      const uint64_t* p = static_cast<const uint64_t*>(data) + member * words;
      uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
      for (int64_t pass = 0; pass < passes; ++pass) {
        for (int64_t w = 0; w + 8 <= words; w += 8) {
          a ^= p[w], b ^= p[w + 1], c ^= p[w + 2], d ^= p[w + 3];
          e ^= p[w + 4], f ^= p[w + 5], g ^= p[w + 6], h ^= p[w + 7];
        }
        // without this the compiler may notice that every second pass undoes the one before
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : : "memory");
      }
      sink += a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
    });
    const double seconds = seconds_since(began) / double(passes);
    if (best < 0 || seconds < best) best = seconds;
  }
  return best;
}

}  // namespace paceline
