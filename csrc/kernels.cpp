// One instruction-set variant of the kernels: compiled several times, with PL_LEVEL and
// PL_NAMESPACE saying which.
#include "kernels.h"
#include "simd.h"
#if PL_LEVEL == 1
#include "gemm_avx2.h"
#else
#include "gemm.h"
#endif
#include "blocks.h"
#include "tables.h"
#include "attend.h"
#include "attend_i8.h"
#include "encode.h"
#include "softmax_exp.h"
#include "low_rank.h"

namespace PL_NAMESPACE {

static void rms_norm(const float* x, const float* w, int64_t n, float eps, float* y) {
  vf sum0 = zero(), sum1 = zero();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const vf a = load(x + i), b = load(x + i + 16);
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  for (; i < n; i += 16) {
    const int left = n - i < 16 ? int(n - i) : 16;
    const vf a = load_n(x + i, left);
    sum0 = fma(a, a, sum0);
  }
  const vf f = set1(1.0f / __builtin_sqrtf(hsum(add(sum0, sum1)) / float(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) store(y + i, mul(mul(load(x + i), f), load(w + i)));
  if (i < n) {
    const int left = int(n - i);
    store_n(y + i, mul(mul(load_n(x + i, left), f), load_n(w + i, left)), left);
  }
}

static int32_t likeliest(const float* x, int64_t n) {
  // the largest of each run of values first, then its place in the run that has it
  constexpr int64_t run = 256;
  vf wrong = zero();
  float top = 0;
  int64_t at = -1;
  for (int64_t i = 0; i < n; i += run) {
    const int64_t end = i + run < n ? i + run : n;
    int64_t j = i;
    float most = x[i];
    if (end - i >= 16) {
      vf high = load(x + i);
      for (; j + 16 <= end; j += 16) {
        const vf v = load(x + j);
        high = vmax(v, high);
        // zero, but for infinities and NaN
        wrong = fma(v, zero(), wrong);
      }
      most = hmax(high);
    }
    for (; j < end; ++j) {
      most = x[j] > most ? x[j] : most;
      if (!(x[j] * 0.0f == 0.0f)) return -1;
    }
    if (at < 0 || most > top) {
      top = most;
      at = i;
    }
  }
  if (!(hsum(wrong) == 0.0f)) return -1;
  while (x[at] != top) ++at;
  return int32_t(at);
}

static void rope(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, fma(b, c, mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

static void encode_query(const float* x, int head_dim, float factor, Kv kind, void* y, float* scale) {
  if (kind == Kv::kI8) {
    vf v[kMaxHeadDim / 16];
    for (int d = 0; d < head_dim; d += 16) v[d / 16] = load(x + d);
    const float top = reach<2>(v, head_dim / 16);
    *scale = top / 127.0f * factor;
    to_bytes(x, head_dim, steps_in(top), 0, static_cast<uint8_t*>(y));
    return;
  }
  const vf f = set1(factor);
  for (int d = 0; d < head_dim; d += 16) {
    const vf v = mul(load(x + d), f);
    if (kind == Kv::kF32 || !kBF16Pairs)
      store(static_cast<float*>(y) + d, v);
    else
      store_bf16(static_cast<uint16_t*>(y) + d, v);
  }
}

static void expect_kv(int head_dim, int slot, Kv kind, const uint8_t* tile) {
  const int64_t g = kind == Kv::kF32 ? 1 : kind == Kv::kBF16 ? 2 : 4, n = head_dim;
  for (int64_t d = 0; d < n; d += g) prefetch_for_write(tile + d / g * 64);
  const uint8_t* values = tile + n * 64 / g + slot / g * n * 4;
  for (int64_t d = 0; d < n * 4; d += 64) prefetch_for_write(values + d);
}

// Byte by byte: other members of the team write the other tokens of the same words.
static void store_kv(const float* k, const float* v, int head_dim, int slot, Kv kind, uint8_t* tile) {
  const int64_t n = head_dim;
  if (kind == Kv::kF32) {
    float* keys = reinterpret_cast<float*>(tile);
    for (int64_t d = 0; d < n; ++d) keys[d * kTile + slot] = k[d];
    memcpy(keys + n * kTile + slot * n, v, size_t(n) * 4);
  } else if (kind == Kv::kBF16) {
    alignas(64) uint16_t row[kMaxHeadDim];
    uint8_t* values = tile + n * kTile * 2;
    for (int64_t d = 0; d < n; d += 16) store_bf16(row + d, load(k + d));
    for (int64_t d = 0; d < n; d += 2) memcpy(tile + (d / 2) * 64 + slot * 4, row + d, 4);
    for (int64_t d = 0; d < n; d += 16) store_bf16(row + d, load(v + d));
    for (int64_t d = 0; d < n; ++d)
      memcpy(values + (int64_t(slot / 2) * n + d) * 4 + (slot % 2) * 2, row + d, 2);
  } else {
    alignas(64) uint8_t row[kMaxHeadDim];
    uint8_t* values = tile + n * kTile;
    float* scales = reinterpret_cast<float*>(values + n * kTile);
    const float top_k = largest(k, n), top_v = largest(v, n);
    scales[slot] = top_k / 127.0f;
    scales[kTile + slot] = top_v / 127.0f;
    to_bytes(k, n, steps_in(top_k), 128, row);
    for (int64_t d = 0; d < n; d += 4) memcpy(tile + (d / 4) * 64 + slot * 4, row + d, 4);
    to_bytes(v, n, steps_in(top_v), 0, row);
    for (int64_t d = 0; d < n; ++d) values[(int64_t(slot / 4) * n + d) * 4 + slot % 4] = row[d];
  }
}

#define PL_BLOCKS \
  gemm_blocks<BlockQ4K>, gemm_blocks<BlockQ5K>, gemm_blocks<BlockQ6K>, gemm_looked<Weights::kIQ4NL>, \
  gemm_looked<Weights::kIQ4XS>, gemm_looked<Weights::kMXFP4>
#if PL_LEVEL == 1
#define PL_BF16_ACTS Acts::kF32
#define PL_GEMM \
  {gemm_256<TileFloat<Weights::kF32>>, gemm_256<TileFloat<Weights::kBF16>>, gemm_256<TileI8>, \
   gemm_256<TileQ4<Weights::kQ4>>, gemm_256<TileQ4<Weights::kQ40>>, PL_BLOCKS}
#else
#define PL_BF16_ACTS Acts::kBF16
#define PL_GEMM \
  {gemm<DotF32>, gemm<DotBF16>, gemm<DotI8>, gemm_q4<Weights::kQ4>, gemm_q4<Weights::kQ40>, PL_BLOCKS}
#endif

static const Kernels table = {
    PL_NAME,
    kRows,
    !PL_BYTE_DOTS,
    {4, kBF16Pairs ? 2 : 4, 1},
    {Acts::kF32, PL_BF16_ACTS, Acts::kI8, Acts::kI8ForQ4, Acts::kI8ForQ4, Acts::kI8ForQ4, Acts::kI8ForQ4, Acts::kI8ForQ4,
     Acts::kI8ForQ4, Acts::kI8ForQ4, Acts::kI8ForQ4},
    PL_GEMM,
    rms_norm,
    encode,
    rope,
    encode_query,
    expect_kv,
    store_kv,
    {attend<DotF32>, attend<DotBF16>, attend_i8},
    shrink,
    expand,
    likeliest,
    cap_logits,
    merge_part,
    finish_parts,
    first_largest,
    masked,
    weigh,
    tops,
    sum_at_least,
    collect,
    rotate,
    quantize_u8,
};

}  // namespace PL_NAMESPACE

namespace paceline {
const Kernels* PL_TABLE() { return &PL_NAMESPACE::table; }
}  // namespace paceline
