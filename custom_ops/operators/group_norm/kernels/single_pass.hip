// GroupNorm in a single pass, channels last: the pixels of a block's span stay in registers between statistics and
// output.
//
// Launch: block (kBlock, 1, 1), grid (groups / groups_per_block, batch, 1), static LDS only; needs span % kVec == 0 and
// spatial <= kItems * (kBlock / (span / kVec)), span = groups_per_block * channels_per_group.
#include "operators/group_norm/kernels/span.h"

namespace sd_ort {

template <class T, int kVec, int kItems, int kBlock>
__global__ __launch_bounds__(kBlock) void group_norm_single_pass_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    QuantizedOutput<T> y, T* sum, int affine_is_float, int spatial, int channels, int channels_per_group,
    int groups_per_block, int activation, float epsilon) {
  wait_for_predecessor();
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(kBlock)];
  const Slice<kVec> slice(kBlock, blockIdx.x, channels_per_group, groups_per_block);
  const int64_t sample = blockIdx.y;
  const int pixels = slice.used && slice.pixel < spatial ? (spatial - 1 - slice.pixel) / slice.pixel_step + 1 : 0;
  // Threads with fewer items reload their last one, and threads without items another thread's: loads without branches
  // need fewer registers.
  const int last = max(pixels, 1) - 1;
  // The address of an item is uniform over the block plus a 32-bit offset of the thread.
  const int64_t begin =
      sample * spatial * channels + static_cast<int64_t>(blockIdx.x) * groups_per_block * channels_per_group;
  const uint32_t stride = static_cast<uint32_t>(slice.pixel_step * channels);
  const uint32_t offset = static_cast<uint32_t>(min(slice.pixel, spatial - 1) * channels + slice.in_span);

  Pack items[kItems];
  if (skip == nullptr && skip_channels == nullptr && bias == nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = Pack::load(x + begin + (offset + min(i, last) * stride));
  } else {
    float offsets[kVec];
    load_offsets(offsets, skip_channels, bias, sample, channels, slice.channel);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = offset + min(i, last) * stride;
      float v[kVec], other[kVec];
      Pack::load(x + begin + at).unpack(v);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] += offsets[k];
      if (skip != nullptr) {
        Pack::load(skip + begin + at).unpack(other);
#pragma unroll
        for (int k = 0; k < kVec; ++k) v[k] += other[k];
      }
      items[i] = Pack::pack(v);
      if (sum != nullptr && i < pixels) items[i].store(sum + begin + at);
    }
  }

  ShiftedSums sums[kVec];
  uint32_t counted = pixels;
  launder(counted);  // recompute comparisons: the masks of all items exceed the scalar registers
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float v[kVec];
    if constexpr (sizeof(T) == 4) launder(items[i].raw);  // else read with parts of the next one, and kept in memory
    items[i].unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (i == 0) sums[k].start(v[k]);
      sums[k].add(i < static_cast<int>(counted) ? v[k] : sums[k].first);  // adds zero
    }
    if (i % 32 == 31) {  // the compiler would add all items of one channel first, and keep their masks for the next one
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        launder(sums[k].sum);
        launder(sums[k].squares);
      }
      launder(counted);
    }
  }
  const SliceMoments<kVec> mine(sums, slice.low_count, pixels);

  const float count = static_cast<float>(spatial) * channels_per_group;
  float low_mean = 0.f, high_mean = 0.f, low_factor = 0.f, high_factor = 0.f;
  for (int group = 0; group < groups_per_block; ++group) {
    const Moments& part = group == slice.low_group       ? mine.low
                          : group == slice.low_group + 1 ? mine.high
                                                         : Moments::empty();
    const Moments all = block_moments<kBlock>(part, count, shared);
    const float factor = rsqrtf(all.m2 / count + epsilon);
    if (group == slice.low_group) {
      low_mean = all.mean;
      low_factor = factor;
    } else if (group == slice.low_group + 1) {
      high_mean = all.mean;
      high_factor = factor;
    }
  }

  Normalizer<T, kVec> normalizer;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const bool is_low = k < slice.low_count;
    normalizer.set(k, is_low ? low_mean : high_mean,
                   (is_low ? low_factor : high_factor) * affine_value<T>(gamma, affine_is_float, slice.channel + k),
                   affine_value<T>(beta, affine_is_float, slice.channel + k));
  }
  uint32_t at = offset;
  uint32_t stored = pixels;
  launder(stored);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < static_cast<int>(stored)) {
      float v[kVec];
      launder(items[i].raw);  // unpack again: the floats of all items would need twice the registers
      items[i].unpack(v);
      normalizer.apply(v, activation);
      y.store(begin + at, v);
      at += stride;
    }
  }
}

namespace {

template <class T, int kVec, int kItems, int kBlock>
const char* launch_items(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  const GroupNormArguments<T> a(p);
  return launch(group_norm_single_pass_kernel<T, kVec, kItems, kBlock>,
                dim3(p.groups / parameters.groups_per_block, p.batch), dim3(kBlock), 0, stream, a.x, a.skip,
                a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial, p.channels,
                a.channels_per_group, parameters.groups_per_block, p.activation, p.epsilon);
}

template <class T, int kVec>
const char* launch_vectors(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  constexpr int kBytes = kVec * sizeof(T);
  if (parameters.block == 1024) return launch_items<T, kVec, group_norm_items(24, kBytes), 1024>(p, parameters, stream);
  if (parameters.block == 256) return launch_items<T, kVec, group_norm_items(24, kBytes), 256>(p, parameters, stream);
  if constexpr (kBytes > 2) {
    if (parameters.registers == 44)
      return launch_items<T, kVec, group_norm_items(44, kBytes), 512>(p, parameters, stream);
  }
  if constexpr (kBytes == 16) {
    if (parameters.registers == 84)
      return launch_items<T, kVec, group_norm_items(84, kBytes), 512>(p, parameters, stream);
  }
  return "no instance of this size";
}

}  // namespace

const char* group_norm_single_pass(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  return with_vectors(p.dtype, parameters.vector_bytes, [&](auto access) {
    using Access = decltype(access);
    return launch_vectors<typename Access::type, Access::kVec>(p, parameters, stream);
  });
}

}  // namespace sd_ort
