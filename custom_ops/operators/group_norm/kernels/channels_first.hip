// GroupNorm, channels first: one block per group, two reads.
//
// Launch: block (512, 1, 1), grid (groups, batch, 1), static LDS only; needs spatial % kVec == 0.
#include "operators/group_norm/kernels/span.h"

namespace sd_ort {

constexpr int kChannelsFirstBlock = 512;

template <class T, int kVec>
__global__ __launch_bounds__(kChannelsFirstBlock) void group_norm_channels_first_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    QuantizedOutput<T> y, T* sum, int affine_is_float, int spatial, int channels, int channels_per_group,
    int activation, float epsilon) {
  wait_for_predecessor();
  using Pack = Vec<T, kVec>;
  constexpr int kStep = kChannelsFirstBlock * kVec;
  __shared__ float shared[2 * max_waves(kChannelsFirstBlock)];
  const int64_t sample = blockIdx.y;
  const int first_channel = static_cast<int>(blockIdx.x) * channels_per_group;
  const int64_t begin = (sample * channels + first_channel) * spatial;
  const int64_t length = static_cast<int64_t>(channels_per_group) * spatial;
  const auto load = [&](int64_t at, float(&v)[kVec]) {
    Pack::load(x + begin + at).unpack(v);
    if (skip != nullptr) {
      float more[kVec];
      Pack::load(skip + begin + at).unpack(more);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] += more[k];
    }
    const int channel = first_channel + static_cast<int>(at / spatial);
    float offset = bias == nullptr ? 0.f : to_float(bias[channel]);
    if (skip_channels != nullptr) offset += to_float(skip_channels[sample * channels + channel]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) v[k] += offset;
  };

  ShiftedSums sums{};
  int count = 0;
  for (int64_t at = threadIdx.x * kVec; at < length; at += kStep) {
    float v[kVec];
    load(at, v);
    if (sum != nullptr) {
      const Pack rounded = Pack::pack(v);
      rounded.store(sum + begin + at);
      rounded.unpack(v);
    }
    if (count == 0) sums.start(v[0]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sums.add(v[k]);
    count += kVec;
  }
  const Moments all =
      block_moments<kChannelsFirstBlock>(sums.moments(static_cast<float>(count)), static_cast<float>(length), shared);
  const float factor = rsqrtf(all.m2 / all.count + epsilon);
  for (int64_t at = threadIdx.x * kVec; at < length; at += kStep) {
    float v[kVec];
    if (sum != nullptr) {
      Pack::load(sum + begin + at).unpack(v);  // stored by this thread
    } else {
      load(at, v);
    }
    const int channel = first_channel + static_cast<int>(at / spatial);
    const float scale = factor * affine_value<T>(gamma, affine_is_float, channel);
    const float shift = affine_value<T>(beta, affine_is_float, channel);
#pragma unroll
    for (int k = 0; k < kVec; ++k) v[k] = (v[k] - all.mean) * scale + shift;
    if (activation == 1) silu_all(v);
    y.store(begin + at, v);
  }
}

namespace {

template <class T, int kVec>
const char* launch_vectors(const GroupNormParams& p, void* stream) {
  const GroupNormArguments<T> a(p);
  return launch(group_norm_channels_first_kernel<T, kVec>, dim3(p.groups, p.batch), dim3(kChannelsFirstBlock), 0,
                stream, a.x, a.skip, a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial,
                p.channels, a.channels_per_group, p.activation, p.epsilon);
}

}  // namespace

const char* group_norm_channels_first(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return parameters.vector_bytes == 16 ? launch_vectors<T, 16 / sizeof(T)>(p, stream)
                                         : launch_vectors<T, 1>(p, stream);
  });
}

}  // namespace sd_ort
