// Activations of GPU kernels, with the hardware's own exponential and reciprocal. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// 1 / x to about 1 unit in the last place.
__device__ inline float reciprocal(float x) {
#if defined(SD_ORT_EMULATED)
  return 1.f / x;
#elif SD_ORT_HIP
  return __builtin_amdgcn_rcpf(x);
#else
  return __fdividef(1.f, x);
#endif
}

// e^x to about 2 units in the last place times |x|; 0 and infinity beyond the ends.
__device__ inline float exponential(float x) {
#if defined(SD_ORT_EMULATED)
  return expf(x);
#else
  return __expf(x);
#endif
}

// x / (1 + e^-x). The exponent is held below 88: e^-x stays finite and its reciprocal normal.
__device__ inline float silu(float x) { return x * reciprocal(1.f + exponential(fminf(-x, 87.f))); }

// The error function to 1.5e-7 absolute: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26.
__device__ inline float error_function(float x) {
  const float magnitude = fabsf(x);
  const float t = reciprocal(1.f + 0.3275911f * magnitude);
  const float p =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return copysignf(1.f - p * exponential(-magnitude * magnitude), x);
}

__device__ inline float gelu(float x) { return 0.5f * x * (1.f + error_function(x * 0.70710678f)); }

}  // namespace sd_ort
