// How a thread of Winograd's transforms reads neighboring channels. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// Channels at once, where their number and addresses allow it; on NVIDIA more would cost registers.
template <class T>
constexpr int kWinogradVec = kHip ? 16 / sizeof(T) : 4;

// AMD's compiler reads numbers of 2 bytes byte by byte here, at odd addresses, unless whole words are in registers
// first.
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
