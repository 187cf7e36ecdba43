// Device: where a kernel writes Y: in T, in float8, or in both.
#pragma once

#include "common/float8.h"
#include "common/gpu.h"

namespace sd_ort {

// Writes values[i] * factor as N elements of float8; `to` is a multiple of N bytes.
template <int N>
__device__ inline void store_float8(uint8_t* to, const float (&values)[N], float factor) {
  if constexpr (N == 1) {
    *to = float_to_float8(values[0] * factor);
  } else {
    uint16_t pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) pairs[i / 2] = float_to_float8_pair(values[i] * factor, values[i + 1] * factor);
    typename Bytes<N>::type raw;
    memcpy(&raw, pairs, N);
    *reinterpret_cast<typename Bytes<N>::type*>(to) = raw;
  }
}

// Element `at` is y[at] and float8[at]; either pointer may be null.
template <class T>
struct QuantizedOutput {
  T* y;
  uint8_t* float8;
  float factor;  // 1 / scale

  // Host.
  QuantizedOutput(void* y, const Float8Output& quantized)
      : y(static_cast<T*>(y)), float8(static_cast<uint8_t*>(quantized.data)), factor(1.f / quantized.scale) {}

  template <int N>
  __device__ void store(int64_t at, const float (&values)[N]) const {
    if (y != nullptr) Vec<T, N>::pack(values).store(y + at);
    if (float8 != nullptr) store_float8(float8 + at, values, factor);
  }
  // Writes values that are rounded to T already.
  template <int N>
  __device__ void store(int64_t at, const Vec<T, N>& rounded) const {
    if (y != nullptr) rounded.store(y + at);
    if (float8 == nullptr) return;
    float values[N];
    rounded.unpack(values);
    store_float8(float8 + at, values, factor);
  }
  __device__ void store(int64_t at, float value) const {
    if (y != nullptr) y[at] = from_float<T>(value);
    if (float8 != nullptr) float8[at] = float_to_float8(value * factor);
  }
};

}  // namespace sd_ort
