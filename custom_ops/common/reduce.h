// Reductions over a wave and over a block, and the running moments that normalisations need. Device code.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

struct Sum {
  __device__ static float merge(float a, float b) { return a + b; }
};

struct Max {
  __device__ static float merge(float a, float b) { return fmaxf(a, b); }
};

// Every lane gets the reduction over its run of kLanes lanes (a power of two, at most the wave size).
template <class Op, int kLanes = SD_ORT_WAVE_SIZE>
__device__ inline float wave_reduce(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = Op::merge(value, shuffle_xor(value, mask));
  return value;
}

// Count, mean and summed squared distance from the mean of some numbers. Two such sets merge without cancellation
// (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979), so
// the variance of large, nearly equal numbers survives.
struct Moments {
  float count;
  float mean;
  float m2;

  __device__ static Moments none() { return {0.f, 0.f, 0.f}; }

  __device__ void merge(const Moments& other) {
    const float total = count + other.count;
    if (total == 0.f) return;
    const float weight = other.count / total;
    const float distance = other.mean - mean;
    mean += distance * weight;
    m2 += other.m2 + distance * distance * count * weight;
    count = total;
  }
};

template <int kLanes = SD_ORT_WAVE_SIZE>
__device__ inline Moments wave_merge(Moments moments) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    moments.merge({shuffle_xor(moments.count, mask), shuffle_xor(moments.mean, mask), shuffle_xor(moments.m2, mask)});
  }
  return moments;
}

// Every thread gets the reduction over the block's kThreads threads (a multiple of 64). `shared` holds
// max_waves(kThreads) floats; the block may use it again after its next barrier.
template <class Op, int kThreads>
__device__ inline float block_reduce(float value, float* shared) {
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  value = wave_reduce<Op>(value);
  if constexpr (kWaves > 1) {
    if (threadIdx.x % SD_ORT_WAVE_SIZE == 0) shared[threadIdx.x / SD_ORT_WAVE_SIZE] = value;
    __syncthreads();
    value = shared[0];
#pragma unroll
    for (int wave = 1; wave < kWaves; ++wave) value = Op::merge(value, shared[wave]);
  }
  return value;
}

// Sums of numbers as they come, taken about the first of them. That number is one of the summed, so its distance from
// their mean is at most sqrt(n) deviations and the variance loses at most n roundoffs, whatever the mean.
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
  __device__ Moments moments(float count) const {
    if (count == 0.f) return Moments::none();
    return {count, first + sum / count, fmaxf(squares - sum * sum / count, 0.f)};
  }
};

// Every thread gets the moments of the whole block, whose numbers are `count` together. `shared` holds
// 2 * max_waves(kThreads) floats; two calls after each other may use the same.
template <int kThreads>
__device__ inline Moments block_moments(const Moments& mine, float count, float* shared) {
  const float mean = block_reduce<Sum, kThreads>(mine.count * mine.mean, shared) / count;
  const float distance = mine.mean - mean;
  const float m2 =
      block_reduce<Sum, kThreads>(mine.m2 + mine.count * distance * distance, shared + max_waves(kThreads));
  return {count, mean, m2};
}

}  // namespace sd_ort
