// Float vectors for CPU kernels, in GCC and clang vector extensions; intrinsics only for float16 conversion and masks.
//
// Only the baseline instruction set supports bfloat16 tensors, for the simulated device in tests. Kernels for bfloat16
// (SD_ORT_BFLOAT16_KERNEL) support them in all instruction sets.
//
// Every cpu.cc is compiled once per instruction set into namespace sd_ort::SD_ORT_ISA, and SD_ORT_CPU_KERNEL selects
// the best one at run time. So cpu.cc must define nothing outside that namespace and call no non-trivial inline
// function of the standard library: the linker keeps one copy, which might contain AVX2.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/float8.h"
#include "common/op.h"

#ifndef SD_ORT_ISA
#define SD_ORT_ISA baseline
#endif

// Declares name(params, parallel) for every instruction set, and name_cpu(params, parallel), which calls the best one.
#define SD_ORT_DECLARE_KERNEL(isa, name, Params)             \
  namespace isa {                                            \
  void name(const Params& params, const Parallel& parallel); \
  }
#if defined(__x86_64__)
namespace sd_ort {
inline bool runs_avx2() {
  static const bool runs =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return runs;
}
inline bool runs_avx512() {
  static const bool runs = runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return runs;
}
}  // namespace sd_ort
#define SD_ORT_CPU_KERNEL_WITH_BASELINE(use_baseline, name, Params)        \
  SD_ORT_DECLARE_KERNEL(baseline, name, Params)                            \
  SD_ORT_DECLARE_KERNEL(avx2, name, Params)                                \
  SD_ORT_DECLARE_KERNEL(avx512, name, Params)                              \
  inline void name##_cpu(const Params& params, const Parallel& parallel) { \
    if (use_baseline) return baseline::name(params, parallel);             \
    return runs_avx512() ? avx512::name(params, parallel)                  \
           : runs_avx2() ? avx2::name(params, parallel)                    \
                         : baseline::name(params, parallel);               \
  }
#define SD_ORT_CPU_KERNEL(name, Params) SD_ORT_CPU_KERNEL_WITH_BASELINE(params.dtype == DType::kBFloat16, name, Params)
#define SD_ORT_BFLOAT16_KERNEL(name, Params) SD_ORT_CPU_KERNEL_WITH_BASELINE(false, name, Params)
#else
#define SD_ORT_CPU_KERNEL(name, Params)         \
  SD_ORT_DECLARE_KERNEL(baseline, name, Params) \
  inline void name##_cpu(const Params& params, const Parallel& parallel) { return baseline::name(params, parallel); }
#define SD_ORT_BFLOAT16_KERNEL SD_ORT_CPU_KERNEL
#endif

namespace sd_ort {
namespace SD_ORT_ISA {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Eight = float __attribute__((vector_size(32)));

// float16 as its bits.
struct Half {
  uint16_t bits;
};

#if defined(__F16C__)
inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
inline Half to_half(float x) { return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }
#else
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t fraction = x.bits & 0x3ffu;
  uint32_t bits;
  float value;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {  // subnormal: fraction * 2^-24
    value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  memcpy(&value, &bits, 4);
  return value;
}

inline Half to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (bits < 0x38800000u) {                                                 // subnormal: adding 0.5 rounds at 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u);  // to nearest even
  return {static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)))};
}
#endif

// bfloat16 as its bits.
struct BFloat {
  uint16_t bits;
};
inline float to_float(BFloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline BFloat to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};  // NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};                  // to nearest even
}

inline float to_float(float x) { return x; }
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Half from_float<Half>(float x) {
  return to_half(x);
}
template <>
inline BFloat from_float<BFloat>(float x) {
  return to_bfloat(x);
}

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof(values));
  return values;
}
inline Eight load_eight(const float* from) {
  Eight values;
  memcpy(&values, from, sizeof(values));
  return values;
}
inline void store(float* to, Floats values) { memcpy(to, &values, sizeof(values)); }
inline void store_eight(float* to, Eight values) { memcpy(to, &values, sizeof(values)); }

#if defined(__F16C__)
inline Eight load_eight(const Half* from) {
  return (Eight)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_eight(Half* to, Eight values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Eight load_eight(const Half* from) {
  Eight values;
  for (int i = 0; i < 8; ++i) values[i] = to_float(from[i]);
  return values;
}
inline void store_eight(Half* to, Eight values) {
  for (int i = 0; i < 8; ++i) to[i] = to_half(values[i]);
}
#endif
#if defined(__AVX512F__)
inline Eight low_half(Floats x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
inline Eight high_half(Floats x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Floats load(const Half* from) {
  return __builtin_shufflevector(load_eight(from), load_eight(from + 8), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                 14, 15);
}
inline void store(Half* to, Floats values) {
  store_eight(to, low_half(values));
  store_eight(to + 8, high_half(values));
}
#else
inline Floats load(const Half* from) { return load_eight(from); }
inline void store(Half* to, Floats values) { store_eight(to, values); }
#endif

inline Floats load(const BFloat* from) {
  Floats values;
  for (int64_t i = 0; i < kLanes; ++i) values[i] = to_float(from[i]);
  return values;
}
inline void store(BFloat* to, Floats values) {
  for (int64_t i = 0; i < kLanes; ++i) to[i] = to_bfloat(values[i]);
}
inline Eight load_eight(const BFloat* from) {
  Eight values;
  for (int i = 0; i < 8; ++i) values[i] = to_float(from[i]);
  return values;
}
inline void store_eight(BFloat* to, Eight values) {
  for (int i = 0; i < 8; ++i) to[i] = to_bfloat(values[i]);
}

// Calls run(T{}) with the type T of a dtype.
template <class Run>
inline void by_type(DType dtype, Run run) {
#if !defined(__AVX2__)
  if (dtype == DType::kBFloat16) return run(BFloat{});
#endif
  dtype == DType::kFloat32 ? run(float{}) : run(Half{});
}

// Load or store the first `count` elements of a vector. Other lanes are loaded as 0 and not stored.
template <class Vector = Floats, class T>
inline Vector load_some(const T* from, int64_t count) {
  Vector values = {};
  for (int64_t i = 0; i < count; ++i) values[i] = to_float(from[i]);
  return values;
}
template <class T, class Vector>
inline void store_some(T* to, Vector values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(values[i]);
}

#if defined(__AVX512F__)
inline Floats load_some(const float* from, int64_t count) {
  return (Floats)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}
inline void store_some(float* to, Floats values, int64_t count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)values);
}
#endif

// Where a kernel writes Y: in T, in float8, or in both; either pointer may be null.
template <class T>
struct QuantizedOutput {
  T* y;
  uint8_t* float8;
  float scale;

  QuantizedOutput(void* to, const Float8Output& quantized)
      : y(static_cast<T*>(to)), float8(static_cast<uint8_t*>(quantized.data)), scale(quantized.scale) {}

  QuantizedOutput operator+(int64_t offset) const {
    QuantizedOutput at = *this;
    if (y != nullptr) at.y += offset;
    if (float8 != nullptr) at.float8 += offset;
    return at;
  }
};
template <class T, class Vector>
inline void store_some(const QuantizedOutput<T>& to, Vector values, int64_t count) {
  if (to.y != nullptr) store_some(to.y, values, count);
  if (to.float8 == nullptr) return;
  for (int64_t i = 0; i < count; ++i) to.float8[i] = float_to_float8(values[i] / to.scale);
}
template <class T>
inline void store(const QuantizedOutput<T>& to, Floats values) {
  if (to.y != nullptr) store(to.y, values);
  if (to.float8 != nullptr) store_some(QuantizedOutput<T>(nullptr, {to.float8, to.scale}), values, kLanes);
}

inline Floats select(Ints mask, Floats if_true, Floats if_false) {
  return (Floats)((mask & (Ints)if_true) | (~mask & (Ints)if_false));
}
inline Floats minimum(Floats a, Floats b) { return select(a < b, a, b); }
inline Floats maximum(Floats a, Floats b) { return select(a > b, a, b); }
// Combines all lanes by halving.
template <class Combine>
inline float reduce(Floats x, Combine combine) {
#if defined(__AVX512F__)
  Eight eight = combine(low_half(x), high_half(x));
#else
  Eight eight = x;
#endif
  eight = combine(eight, __builtin_shufflevector(eight, eight, 4, 5, 6, 7, 0, 1, 2, 3));
  eight = combine(eight, __builtin_shufflevector(eight, eight, 2, 3, 0, 1, 6, 7, 4, 5));
  eight = combine(eight, __builtin_shufflevector(eight, eight, 1, 0, 3, 2, 5, 4, 7, 6));
  return eight[0];
}
inline float sum(Floats x) {
  return reduce(x, [](auto a, auto b) { return a + b; });
}
inline float largest(Floats x) {
  return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// Transposes 8 vectors in place: lane j of vector i becomes lane i of vector j.
inline void transpose_8x8(Eight (&rows)[8]) {
  Eight a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + j + 2] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// e^x with an error of 2 units in the last place: 2^n times the degree-6 Taylor polynomial of e^r, |r| <= ln(2)/2.
// Clamped to
// [-87.3, 88.7], so that no result is subnormal or infinite; NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats clamped = select(x < splat(-87.3f), splat(-87.3f), select(x > splat(88.7f), splat(88.7f), x));
  const Floats shifter = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (clamped * splat(1.44269504f) + shifter) - shifter;
  const Floats r = (clamped - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);  // ln 2 in two parts
  Floats p = splat(1.f / 720.f);
  p = p * r + splat(1.f / 120.f);
  p = p * r + splat(1.f / 24.f);
  p = p * r + splat(1.f / 6.f);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.f);
  p = p * r + splat(1.f);
  const Ints exponent = __builtin_convertvector(n, Ints);
  // Two factors: n reaches 128, and 2^128 is not a float.
  const Ints half = exponent >> 1;
  const Floats low = (Floats)((half + 127) << 23);
  const Floats high = (Floats)((exponent - half + 127) << 23);
  return p * low * high;
}

inline Floats silu(Floats x) { return x / (splat(1.f) + exp(-x)); }

// Error function with an absolute error of 1.5e-7: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26.
inline Floats erf(Floats x) {
  const Floats magnitude = maximum(x, -x);
  const Floats t = splat(1.f) / (splat(1.f) + splat(0.3275911f) * magnitude);
  Floats p = splat(1.061405429f);
  p = p * t - splat(1.453152027f);
  p = p * t + splat(1.421413741f);
  p = p * t - splat(0.284496736f);
  p = p * t + splat(0.254829592f);
  const Floats value = splat(1.f) - p * t * exp(-magnitude * magnitude);
  return select(x < splat(0.f), -value, value);
}

inline Floats gelu(Floats x) { return 0.5f * x * (1.f + erf(x * 0.70710678f)); }

// Scratch memory of a thread, reused between calls and aligned to cache lines.
template <class T>
class ThreadScratch {
 public:
  ~ThreadScratch() { delete[] memory_; }
  T* get(int64_t count) {
    if (count > count_) {
      delete[] memory_;
      count_ = 0;
      memory_ = new T[count + 64 / sizeof(T)];
      count_ = count;
    }
    return memory_ + (64 - reinterpret_cast<uintptr_t>(memory_) % 64) % 64 / sizeof(T);
  }

 private:
  T* memory_ = nullptr;
  int64_t count_ = 0;
};

// Rows of `length` elements per task of a row-wise kernel: enough to make the cost of a task negligible.
inline int64_t rows_per_task(int64_t length) { return length >= 16384 ? 1 : 16384 / (length > 0 ? length : 1); }

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
