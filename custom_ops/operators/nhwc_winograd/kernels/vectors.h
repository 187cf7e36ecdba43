// Vector loads of adjacent channels for the Winograd transforms. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// Channels per access if their number and addresses allow it; more would cost registers on NVIDIA.
template <class T>
constexpr int kWinogradVec = kHip ? 16 / sizeof(T) : 4;

// Loads complete words first: AMD's compiler would otherwise split 2-byte elements into byte loads here.
template <class T, int kVec>
__device__ inline void unpack_words(const Vec<T, kVec>& vector, float (&numbers)[kVec]) {
  if constexpr (kHip && sizeof(T) == 2 && kVec > 1) {
    uint32_t words[kVec / 2];
    memcpy(words, &vector.raw, sizeof(words));
#if defined(__HIP_DEVICE_COMPILE__)
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) asm("" : "+v"(words[i]));
#endif
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
      T number;
      memcpy(&number, &bits, sizeof(number));
      numbers[i] = to_float(number);
    }
  } else {
    vector.unpack(numbers);
  }
}

}  // namespace sd_ort
