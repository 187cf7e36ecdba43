// Reductions over waves and blocks, and moments for normalizations. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

struct Sum {
  __device__ static float merge(float a, float b) { return a + b; }
};

struct Max {
  __device__ static float merge(float a, float b) { return fmaxf(a, b); }
};

// Returns to every lane the reduction over its group of kLanes adjacent lanes (a power of two up to the wave size).
template <class Op, int kLanes = SD_ORT_WAVE_SIZE>
__device__ inline float wave_reduce(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = Op::merge(value, shuffle_xor(value, mask));
  return value;
}

// Count, mean and sum of squared distances from the mean. Merging these stays accurate for large, nearly equal values,
// unlike sums of squares (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances", 1979).
struct Moments {
  float count;
  float mean;
  float m2;

  __device__ static Moments empty() { return {0.f, 0.f, 0.f}; }
};

// Returns to every thread the reduction over the kThreads threads of the block (a multiple of 64). `shared` holds
// max_waves(kThreads) floats and may be reused after the next barrier.
template <class Op, int kThreads>
__device__ inline float block_reduce(float value, float* shared) {
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  value = wave_reduce<Op>(value);
  if constexpr (kWaves > 1) {
    if (threadIdx.x % SD_ORT_WAVE_SIZE == 0) shared[threadIdx.x / SD_ORT_WAVE_SIZE] = value;
    block_barrier();
    value = shared[0];
#pragma unroll
    for (int wave = 1; wave < kWaves; ++wave) value = Op::merge(value, shared[wave]);
  }
  return value;
}

// Running sums of values and squares, shifted by the first value. Its distance from the mean is at most sqrt(n)
// standard deviations, so the variance loses at most n roundoffs for any mean.
struct ShiftedSums {
  float first;
  float sum;
  float squares;

  __device__ void start(float value) {
    first = value;
    sum = squares = 0.f;
  }
  __device__ void add(float value) {
    const float distance = value - first;
    sum += distance;
    squares += distance * distance;
  }
  // Moments of `count` values; `inverse` is 1 / count.
  __device__ Moments moments(float count, float inverse) const {
    return {count, first + sum * inverse, fmaxf(squares - sum * (sum * inverse), 0.f)};
  }
  __device__ Moments moments(float count) const {
    return count == 0.f ? Moments::empty() : moments(count, 1.f / count);
  }
};

// Merges moments of several parts without a division per part: sums shifted by the mean of one part.
struct MomentSums {
  float first;
  float count;
  float sum;
  float squares;

  __device__ explicit MomentSums(float first) : first(first), count(0.f), sum(0.f), squares(0.f) {}
  __device__ void add(const Moments& part) {
    const float distance = part.mean - first;
    count += part.count;
    sum += part.count * distance;
    squares += part.m2 + part.count * distance * distance;
  }
  __device__ void add(const MomentSums& other) {  // with the same `first`
    count += other.count;
    sum += other.sum;
    squares += other.squares;
  }
  __device__ Moments moments() const {
    const float inverse = 1.f / count;
    return {count, first + sum * inverse, fmaxf(squares - sum * (sum * inverse), 0.f)};
  }
};

// Returns to every thread the moments of the `count` values of the block. `shared` holds 2 * max_waves(kThreads)
// floats; two consecutive calls may use the same.
template <int kThreads>
__device__ inline Moments block_moments(const Moments& mine, float count, float* shared) {
  const float mean = block_reduce<Sum, kThreads>(mine.count * mine.mean, shared) / count;
  const float distance = mine.mean - mean;
  const float m2 =
      block_reduce<Sum, kThreads>(mine.m2 + mine.count * distance * distance, shared + max_waves(kThreads));
  return {count, mean, m2};
}

}  // namespace sd_ort
