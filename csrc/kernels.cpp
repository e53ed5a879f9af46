// One instruction-set variant of the kernels: compiled several times, with PL_LEVEL and
// PL_NAMESPACE saying which.
#include "kernels.h"
#include "simd.h"
#include "gemm.h"
#include "attend.h"
#include "attend_i8.h"
#include "weigh.h"

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

PL_INLINE float largest(const float* x, int64_t n) {
  vf high = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) high = vmax(vabs(load(x + i)), high);
  if (i < n) high = vmax(vabs(load_n(x + i, int(n - i))), high);
  return hmax(high);
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

// Steps of a byte in what is `top` at most. None where they were no number in float32: such values are
// nothing beside any others, and infinitely many steps of a zero are not zero.
PL_INLINE float steps_in(float top) { return top > 1e-36f ? 127.0f / top : 0.0f; }

// round(x * factor) + offset as bytes
PL_INLINE void to_bytes(const float* x, int64_t n, float factor, int offset, uint8_t* y) {
  const vf f = set1(factor);
  const vi shift = set1i(offset);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_bytes(y + i, addi(to_int(mul(load(x + i), f)), shift));
  if (i < n) {
    uint8_t rest[16];
    store_bytes(rest, addi(to_int(mul(load_n(x + i, int(n - i)), f)), shift));
    memcpy(y + i, rest, size_t(n - i));
  }
}

// 64 values times the Hadamard matrix of order 64 (Sylvester's, over 8, which makes it orthonormal),
// as bytes; receives the scale of the bytes and their sum
PL_INLINE void encode_group(const float* x, uint8_t* y, float* scale, float* sum) {
  static_assert(kActGroup == 64);
  vf v[4];
  PL_UNROLL
  for (int i = 0; i < 4; ++i)
    v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + 16 * i)))));
  const vf a = add(v[0], v[1]), b = sub(v[0], v[1]), c = add(v[2], v[3]), d = sub(v[2], v[3]);
  v[0] = add(a, c), v[1] = add(b, d), v[2] = sub(a, c), v[3] = sub(b, d);
  const float top = hmax(vmax(vmax(vabs(v[0]), vabs(v[1])), vmax(vabs(v[2]), vabs(v[3]))));
  const vf f = set1(steps_in(top));
  vf total = zero();
  PL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const vf q = round_even(mul(v[i], f));
    total = add(total, q);
    store_bytes(y + 16 * i, to_int(q));
  }
  // the division by 8
  *scale = top * (1.0f / (127 * 8));
  *sum = hsum(total);
}

// fewer than 64 values, as they are
static void encode_rest(const float* x, int n, uint8_t* y, float* scale, float* sum) {
  const float top = largest(x, n);
  const vf f = set1(steps_in(top));
  vf total = zero();
  for (int i = 0; i < n; i += 16) {
    const int lanes = n - i < 16 ? n - i : 16;
    const vf q = round_even(mul(load_n(x + i, lanes), f));
    total = add(total, q);
    uint8_t bytes[16];
    store_bytes(bytes, to_int(q));
    memcpy(y + i, bytes, size_t(lanes));
  }
  *scale = top / 127.0f;
  *sum = hsum(total);
}

static void encode(const float* x, int64_t n, int64_t padded, Acts kind, void* y, float* scale) {
  if (kind == Acts::kF32) {
    memcpy(y, x, size_t(n) * 4);
    memset(static_cast<float*>(y) + n, 0, size_t(padded - n) * 4);
  } else if (kind == Acts::kBF16) {
    uint16_t* out = static_cast<uint16_t*>(y);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
    for (; i < n; ++i) out[i] = float_to_bf16(x[i]);
    memset(out + n, 0, size_t(padded - n) * 2);
  } else if (kind == Acts::kI8) {
    uint8_t* out = static_cast<uint8_t*>(y);
    const int64_t groups = (n + kActGroup - 1) / kActGroup;
    float total = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * kActGroup, count = n - begin < kActGroup ? n - begin : kActGroup;
      float step, sum;
      if (count == kActGroup)
        encode_group(x + begin, out + begin, &step, &sum);
      else
        encode_rest(x + begin, int(count), out + begin, &step, &sum);
      scale[g] = step;
      total += step * sum;
    }
    scale[groups] = 128.0f * total;
    memset(out + n, 0, size_t(padded - n));
  } else {
    const int64_t groups = n / kGroup;
    uint8_t* out = static_cast<uint8_t*>(y);
    for (int64_t g = 0; g < groups; ++g) {
      const float* in = x + g * kGroup;
      const vf a = load(in), b = load(in + 16);
      const float top = hmax(vmax(vabs(a), vabs(b)));
      const vf f = set1(steps_in(top));
      const vf qa = round_even(mul(a, f)), qb = round_even(mul(b, f));
      store_bytes(out + g * kGroup, to_int(qa));
      store_bytes(out + g * kGroup + 16, to_int(qb));
      scale[g] = top / 127.0f;
      scale[groups + g] = scale[g] * hsum(add(qa, qb));
    }
  }
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
    const float top = largest(x, head_dim);
    *scale = top / 127.0f * factor;
    to_bytes(x, head_dim, steps_in(top), 0, static_cast<uint8_t*>(y));
    return;
  }
  const vf f = set1(factor);
  for (int d = 0; d < head_dim; d += 16) {
    const vf v = mul(load(x + d), f);
    if (kind == Kv::kF32)
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

static const Kernels table = {
    PL_NAME,
    kRows,
    {gemm<DotF32>, gemm<DotBF16>, gemm<DotI8>, gemm_q4},
    screen,
    rms_norm,
    encode,
    rope,
    encode_query,
    expect_kv,
    store_kv,
    {attend<DotF32>, attend<DotBF16>, attend_i8},
    likeliest,
    merge_partials,
    first_largest,
    masked,
    weigh,
    tops,
    sum_at_least,
    collect,
};

}  // namespace PL_NAMESPACE

namespace paceline {
const Kernels* PL_TABLE() { return &PL_NAMESPACE::table; }
}  // namespace paceline
