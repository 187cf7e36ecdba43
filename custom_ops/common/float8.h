// Float8 e4m3fn (OCP 8-bit Floating Point Specification 1.0): sign, 4 bits of exponent with bias 7, 3 of mantissa; no
// infinities, 0x7f and 0xff are NaN, the largest number is 448. Host and device code.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIP__) || defined(SD_ORT_EMULATED)
#include "common/gpu.h"  // memcpy of devices
#endif

namespace sd_ort {

#if defined(__CUDACC__) || defined(__HIP__) || defined(SD_ORT_EMULATED)
#define SD_ORT_HOST_DEVICE __host__ __device__ inline
#else
#define SD_ORT_HOST_DEVICE static inline  // compiled once per instruction set
#endif

SD_ORT_HOST_DEVICE float float8_to_float(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24, exponent = bits >> 3 & 0xfu, mantissa = bits & 7u;
  uint32_t wide;
  if ((bits & 0x7fu) == 0x7fu) {
    wide = 0x7fc00000u;
  } else if (exponent != 0) {
    wide = (exponent + 120) << 23 | mantissa << 20;
  } else {  // subnormal: mantissa * 2^-9
    const float value = static_cast<float>(mantissa) * 0.001953125f;
    memcpy(&wide, &value, 4);
  }
  wide |= sign;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest even and saturates; NaN stays. Zero is positive, since the bits of -0 are NaN in AMD's FNUZ format.
// Without branches: unrolled ones take compilers minutes.
SD_ORT_HOST_DEVICE uint8_t float_to_float8(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t clamped = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  const uint32_t normal = ((clamped + 0x7ffffu + (clamped >> 20 & 1u)) >> 20) - (120u << 3);
  float shifted;  // below 2^-6: multiples of 2^-9, which adding 2^14 * 1.5 rounds to
  memcpy(&shifted, &clamped, 4);
  shifted += 24576.f;
  uint32_t subnormal;
  memcpy(&subnormal, &shifted, 4);
  subnormal -= 0x46c00000u;
  const uint32_t rounded = clamped < 0x3c800000u ? subnormal : normal;
  const uint32_t with_sign = rounded == 0 ? 0 : rounded | (bits >> 24 & 0x80u);
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : with_sign);
}

// Converts two numbers, the first one to the low byte. NVIDIA's units read OCP's format, so zero may be negative there.
SD_ORT_HOST_DEVICE uint16_t float_to_float8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint16_t>(float_to_float8(low) | float_to_float8(high) << 8);
#endif
}

}  // namespace sd_ort
