// Activations of GPU kernels, with the hardware's own exponential and reciprocal. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// e^x to about 2 units in the last place times |x|.
__device__ inline float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }

// x / (1 + e^-x). The exponent is held below 88: e^-x stays finite and its reciprocal normal.
__device__ inline float silu(float x) { return x * reciprocal(1.f + exponential(fminf(-x, 87.f))); }

// silu(x) of N numbers, N even or 1: a reciprocal for two of them, as there are four times fewer units for reciprocals
// than bytes a GPU can write. e^-x is held below e^43, so that products of two stay finite: past -43, where silu is
// under 1e-17, the result is x e^-43.
template <int N>
__device__ inline void silu_all(float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = silu(x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float a = 1.f + exponential(fminf(-x[i], 43.f));
      const float b = 1.f + exponential(fminf(-x[i + 1], 43.f));
      const float inverse = reciprocal(a * b);
      x[i] *= inverse * b;
      x[i + 1] *= inverse * a;
    }
  }
}

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
