// GroupNorm of any layout, size and alignment, one element at a time: the reference of the other kernels.
//
// Launch: block (256, 1, 1), grid (groups, batch, 1), static LDS only.
#include "operators/group_norm/kernels/span.h"

namespace sd_ort {

constexpr int kGenericBlock = 256;

template <class T>
__global__ __launch_bounds__(kGenericBlock) void group_norm_generic_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    QuantizedOutput<T> y, T* sum, int affine_is_float, int spatial, int channels, int channels_per_group,
    int channels_last, int activation, float epsilon) {
  wait_for_predecessor();
  __shared__ float shared[2 * max_waves(kGenericBlock)];
  const int64_t sample = blockIdx.y;
  const int first_channel = static_cast<int>(blockIdx.x) * channels_per_group;
  const int64_t count = static_cast<int64_t>(spatial) * channels_per_group;
  const auto channel_of = [&](int64_t i) { return first_channel + static_cast<int>(i % channels_per_group); };
  const auto place = [&](int64_t i) {
    const int64_t pixel = i / channels_per_group, channel = channel_of(i);
    return channels_last ? (sample * spatial + pixel) * channels + channel
                         : (sample * channels + channel) * spatial + pixel;
  };
  const auto value = [&](int64_t i) {
    const int64_t at = place(i);
    float v = to_float(x[at]);
    if (skip != nullptr) v += to_float(skip[at]);
    if (skip_channels != nullptr) v += to_float(skip_channels[sample * channels + channel_of(i)]);
    if (bias != nullptr) v += to_float(bias[channel_of(i)]);
    return v;
  };

  const float first = value(0);  // sums of distances from it stay accurate for a large mean
  float total = 0.f;
  for (int64_t i = threadIdx.x; i < count; i += kGenericBlock) total += value(i) - first;
  const float mean = first + block_reduce<Sum, kGenericBlock>(total, shared) / static_cast<float>(count);
  float squares = 0.f;
  for (int64_t i = threadIdx.x; i < count; i += kGenericBlock) {
    const float distance = value(i) - mean;
    squares += distance * distance;
  }
  squares = block_reduce<Sum, kGenericBlock>(squares, shared + max_waves(kGenericBlock));
  const float factor = rsqrtf(squares / static_cast<float>(count) + epsilon);
  for (int64_t i = threadIdx.x; i < count; i += kGenericBlock) {
    const int channel = channel_of(i);
    const float v = value(i);
    const float normalized = (v - mean) * factor * affine_value<T>(gamma, affine_is_float, channel) +
                             affine_value<T>(beta, affine_is_float, channel);
    y.store(place(i), activation == 1 ? silu(normalized) : normalized);
    if (sum != nullptr) sum[place(i)] = from_float<T>(v);
  }
}

const char* group_norm_generic(const GroupNormParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const GroupNormArguments<T> a(p);
    return launch(group_norm_generic_kernel<T>, dim3(p.groups, p.batch), dim3(kGenericBlock), 0, stream, a.x, a.skip,
                  a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial, p.channels,
                  a.channels_per_group, p.channels_last, p.activation, p.epsilon);
  });
}

}  // namespace sd_ort
