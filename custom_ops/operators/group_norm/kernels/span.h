// Shared parts of the GroupNorm kernels. Nullable pointers: skip, skip_channels (a skip per sample and channel), bias,
// sum. gamma and beta are float if affine_is_float, else T.
//
// Channels last, a block computes `groups_per_block` adjacent groups of a sample. Each thread computes one slice of
// kVec channels of this span for all its pixels, so its gamma, beta and groups are fixed, and a slice touches at most
// two groups (kVec <= channels_per_group).
#pragma once

#include "common/gpu.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "common/reduce.h"
#include "operators/group_norm/op.h"

namespace sd_ort {

template <class T>
__device__ inline float affine_value(const void* values, int affine_is_float, int channel) {
  return affine_is_float ? static_cast<const float*>(values)[channel]
                         : to_float(static_cast<const T*>(values)[channel]);
}

// Slice of the span that a thread computes, and its first pixel.
template <int kVec>
struct Slice {
  int channel;    // first channel of the slice, in the sample
  int in_span;    // first channel of the slice, in the span
  int low_group;  // group of the first element, in the span
  int low_count;  // elements in that group; the rest lie in the next one
  int pixel;      // first pixel of this thread
  int pixel_step;
  bool used;  // false for excess threads

  __device__ Slice(int threads, int span_index, int channels_per_group, int groups_per_block) {
    const int span = channels_per_group * groups_per_block;
    const int slices = span / kVec;
    in_span = static_cast<int>(threadIdx.x) % slices * kVec;
    channel = span_index * span + in_span;
    low_group = in_span / channels_per_group;
    low_count = min(kVec, (low_group + 1) * channels_per_group - in_span);
    pixel = static_cast<int>(threadIdx.x) / slices;
    pixel_step = threads / slices;
    used = pixel < pixel_step;
  }
};

// Loads the sum of skip_channels and bias for each channel of a slice.
template <class T, int kVec>
__device__ inline void load_offsets(float (&offsets)[kVec], const T* skip_channels, const T* bias, int64_t sample,
                                    int channels, int channel) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    offsets[k] = bias == nullptr ? 0.f : to_float(bias[channel + k]);
    if (skip_channels != nullptr) offsets[k] += to_float(skip_channels[sample * channels + channel + k]);
  }
}

// Moments of a thread's slice in its two groups, from the sums of each channel over `pixels` pixels.
template <int kVec>
struct SliceMoments {
  Moments low = Moments::empty();
  Moments high = Moments::empty();

  __device__ SliceMoments(const ShiftedSums (&sums)[kVec], int low_count, int pixels) {
    if (pixels == 0) return;
    const float count = static_cast<float>(pixels);
    const float inverse = 1.f / count;
    float low_mean = 0.f, high_mean = 0.f;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float mean = sums[k].first + sums[k].sum * inverse;
      low_mean += k < low_count ? mean : 0.f;
      high_mean += k < low_count ? 0.f : mean;
    }
    low_mean /= low_count;
    high_mean /= max(kVec - low_count, 1);
    float low_m2 = 0.f, high_m2 = 0.f;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const Moments channel = sums[k].moments(count, inverse);
      const float distance = channel.mean - (k < low_count ? low_mean : high_mean);
      const float m2 = channel.m2 + count * distance * distance;
      low_m2 += k < low_count ? m2 : 0.f;
      high_m2 += k < low_count ? 0.f : m2;
    }
    low = {count * low_count, low_mean, low_m2};
    high = {count * (kVec - low_count), high_mean, high_m2};
  }
};

// Computes the output of a slice: (V - mean) * factor + beta, then SiLU if requested. For 16-bit types the mean is
// folded into beta, which costs a float32 roundoff of mean * factor, far below their own.
template <class T, int kVec>
struct Normalizer {
  static constexpr bool kFolded = sizeof(T) == 2;
  float factor[kVec], shift[kVec], mean[kFolded ? 1 : kVec];

  __device__ void set(int k, float mean_k, float factor_k, float beta) {
    factor[k] = factor_k;
    shift[k] = kFolded ? beta - mean_k * factor_k : beta;
    if constexpr (!kFolded) mean[k] = mean_k;
  }
  __device__ void apply(float (&v)[kVec], int activation) const {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if constexpr (!kFolded) v[k] -= mean[k];
      v[k] = v[k] * factor[k] + shift[k];
    }
    if (activation == 1) silu_all(v);
  }
};

// Arguments of all kernels, in T.
template <class T>
struct GroupNormArguments {
  const T* x;
  const T* skip;
  const T* skip_channels;
  const T* bias;
  QuantizedOutput<T> y;
  T* sum;
  int affine_is_float;
  int channels_per_group;

  explicit GroupNormArguments(const GroupNormParams& p)
      : x(static_cast<const T*>(p.x)),
        skip(p.skip_broadcast ? nullptr : static_cast<const T*>(p.skip)),
        skip_channels(p.skip_broadcast ? static_cast<const T*>(p.skip) : nullptr),
        bias(static_cast<const T*>(p.bias)),
        y(p.y, p.quantized),
        sum(static_cast<T*>(p.sum)),
        affine_is_float(p.affine_dtype == DType::kFloat32),
        channels_per_group(static_cast<int>(p.channels / p.groups)) {}
};

}  // namespace sd_ort
