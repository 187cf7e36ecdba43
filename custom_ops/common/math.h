// Activations of GPU kernels with the hardware exponential and reciprocal. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// e^x with an error of about 2 |x| units in the last place.
__device__ inline float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }

// x / (1 + e^-x). The exponent is limited to 87, so that e^-x is finite and its reciprocal normal.
__device__ inline float silu(float x) { return x * reciprocal(1.f + exponential(fminf(-x, 87.f))); }

// silu(x) of N values (N even or 1) with one reciprocal per pair, since the throughput of reciprocals is below the
// store bandwidth. The exponent is limited to 43, so that the product of two is finite: for x < -43, where |silu(x)| <
// 1e-17, the result is x e^-43.
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

// Error function with an absolute error of 1.5e-7: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26.
__device__ inline float error_function(float x) {
  const float magnitude = fabsf(x);
  const float t = reciprocal(1.f + 0.3275911f * magnitude);
  const float p =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return copysignf(1.f - p * exponential(-magnitude * magnitude), x);
}

__device__ inline float gelu(float x) { return 0.5f * x * (1.f + error_function(x * 0.70710678f)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as x / (1 + e^-2t) with t the argument of tanh.
__device__ inline float gelu_tanh(float x) {
  const float exponent = -1.5957691f * (x + 0.044715f * x * x * x);
  return x * reciprocal(1.f + exponential(fminf(exponent, 87.f)));
}

}  // namespace sd_ort
