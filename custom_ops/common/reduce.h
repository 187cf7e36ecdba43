// Reductions over a wave and over a block, and the running moments that normalizations need. Device code.
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

// Count, mean and summed squared distance from the mean of some numbers: what survives merging when the numbers are
// large and nearly equal, as sums of squares would not (Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances", 1979).
struct Moments {
  float count;
  float mean;
  float m2;

  __device__ static Moments none() { return {0.f, 0.f, 0.f}; }
};

// Every thread gets the reduction over the block's kThreads threads (a multiple of 64). `shared` holds
// max_waves(kThreads) floats; the block may use it again after its next barrier.
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
  // Of `count` numbers; `inverse` is 1 / count.
  __device__ Moments moments(float count, float inverse) const {
    return {count, first + sum * inverse, fmaxf(squares - sum * (sum * inverse), 0.f)};
  }
  __device__ Moments moments(float count) const { return count == 0.f ? Moments::none() : moments(count, 1.f / count); }
};

// Moments of several parts, merged without a division each: sums about the mean of one of the parts, as above.
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
  __device__ void add(const MomentSums& other) {  // taken about the same `first`
    count += other.count;
    sum += other.sum;
    squares += other.squares;
  }
  __device__ Moments moments() const {
    const float inverse = 1.f / count;
    return {count, first + sum * inverse, fmaxf(squares - sum * (sum * inverse), 0.f)};
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
