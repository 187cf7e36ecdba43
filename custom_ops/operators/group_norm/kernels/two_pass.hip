// GroupNorm in two passes, channels last: statistics of each chunk of pixels into `moments`, then the output, with
// chunks in reverse order to start with cached data.
//
// Launch of both: block (256, 1, 1), grid (ceil(spatial / pixels_per_chunk), groups / groups_per_block, batch), static
// LDS only; needs span % kVec == 0, span / kVec <= 256, groups_per_block <= 64.
// moments: 3 floats (count, mean, squared distances) by sample, chunk and group.
#include "operators/group_norm/kernels/span.h"

namespace sd_ort {

constexpr int kTwoPassBlock = GroupNormLaunch::kTwoPassBlock;

// Pixels of a thread's slice, loaded before they are used. Indices past the end load the last pixel: loads without
// branches need fewer registers.
template <class T, int kVec, bool kSkip>
struct Tile {
  static constexpr int kPixels = kVec * sizeof(T) == 16 ? 2 : 4;
  Vec<T, kVec> x[kPixels], skip[kSkip ? kPixels : 1];

  __device__ void load(const T* from, const T* skip_from, int pixel, int step, int end, int channels) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int64_t at = static_cast<int64_t>(min(pixel + i * step, end - 1)) * channels;
      x[i] = Vec<T, kVec>::load(from + at);
      if constexpr (kSkip) skip[i] = Vec<T, kVec>::load(skip_from + at);
    }
  }
  __device__ void unpack(int i, float (&v)[kVec]) const {
    x[i].unpack(v);
    if constexpr (kSkip) {
      float more[kVec];
      skip[i].unpack(more);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] += more[k];
    }
  }
};

template <class T, int kVec, bool kSkip>
__global__ __launch_bounds__(kTwoPassBlock) void group_norm_statistics_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, T* sum, float* moments, int spatial, int channels,
    int channels_per_group, int groups_per_block, int pixels_per_chunk, int chunks) {
  wait_for_predecessor();
  __shared__ float parts[6 * kTwoPassBlock];  // of each thread: low, then high
  const Slice<kVec> slice(kTwoPassBlock, blockIdx.y, channels_per_group, groups_per_block);
  const int64_t sample = blockIdx.z;
  const int64_t begin = sample * spatial * channels + slice.channel;
  const int end = min(spatial, static_cast<int>(blockIdx.x + 1) * pixels_per_chunk);
  const int step = slice.pixel_step;
  const int first = slice.used ? static_cast<int>(blockIdx.x) * pixels_per_chunk + slice.pixel : end;

  Tile<T, kVec, kSkip> next;
  next.load(x + begin, skip + begin, first, step, end, channels);
  float offsets[kVec];
  load_offsets(offsets, skip_channels, bias, sample, channels, slice.channel);
  ShiftedSums sums[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) sums[k].start(0.f);
  int pixels = 0;
  for (int pixel = first; pixel < end; pixel += next.kPixels * step) {
    const Tile<T, kVec, kSkip> tile = next;
    next.load(x + begin, skip + begin, pixel + tile.kPixels * step, step, end, channels);
#pragma unroll
    for (int i = 0; i < tile.kPixels; ++i) {
      const bool in_range = pixel + i * step < end;
      float v[kVec];
      tile.unpack(i, v);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] += offsets[k];
      if (sum != nullptr && in_range) {
        Vec<T, kVec>::pack(v).store(sum + begin + static_cast<int64_t>(pixel + i * step) * channels);
      }
      if (sum != nullptr) Vec<T, kVec>::pack(v).unpack(v);  // normalizes the rounded S
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        if (i == 0 && pixel == first) sums[k].start(v[k]);
        sums[k].add(in_range ? v[k] : sums[k].first);  // adds zero past the end
      }
      pixels += in_range;
    }
  }
  const SliceMoments<kVec> mine(sums, slice.low_count, pixels);
  float* part = parts + 6 * threadIdx.x;
  part[0] = mine.low.count;
  part[1] = mine.low.mean;
  part[2] = mine.low.m2;
  part[3] = mine.high.count;
  part[4] = mine.high.mean;
  part[5] = mine.high.m2;
  block_barrier();

  // One thread per group merges the slices that touch it.
  const int group = static_cast<int>(threadIdx.x);
  if (group >= groups_per_block) return;
  const int slices = channels_per_group * groups_per_block / kVec;
  const int rows = kTwoPassBlock / slices;
  const int first_slice = group * channels_per_group / kVec;
  const auto moments_of = [&](int row, int s) {
    const bool is_low = s * kVec / channels_per_group == group;
    const float* from = parts + 6 * (row * slices + s) + (is_low ? 0 : 3);
    return Moments{from[0], from[1], from[2]};
  };
  MomentSums sums_of_parts(moments_of(0, first_slice).mean);
  for (int s = first_slice; s * kVec < (group + 1) * channels_per_group; ++s) {
    for (int row = 0; row < rows; ++row) sums_of_parts.add(moments_of(row, s));
  }
  const Moments all = sums_of_parts.moments();
  const int groups = channels / channels_per_group;
  float* to = moments + 3 * ((sample * chunks + blockIdx.x) * groups + blockIdx.y * groups_per_block + group);
  to[0] = all.count;
  to[1] = all.mean;
  to[2] = all.m2;
}

template <class T, int kVec, bool kSkip>
__global__ __launch_bounds__(kTwoPassBlock) void group_norm_apply_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    const float* moments, QuantizedOutput<T> y, int affine_is_float, int spatial, int channels, int channels_per_group,
    int groups_per_block, int pixels_per_chunk, int chunks, int activation, float epsilon) {
  wait_for_predecessor();
  __shared__ float parts[3 * kTwoPassBlock], means[GroupNormLaunch::kMaxGroupsPerBlock],
      factors[GroupNormLaunch::kMaxGroupsPerBlock];
  const int64_t sample = blockIdx.z;
  const int groups = channels / channels_per_group;
  const Slice<kVec> slice(kTwoPassBlock, blockIdx.y, channels_per_group, groups_per_block);
  const int64_t begin = sample * spatial * channels + slice.channel;
  const int chunk_index = chunks - 1 - static_cast<int>(blockIdx.x);
  const int end = min(spatial, (chunk_index + 1) * pixels_per_chunk);
  const int step = slice.pixel_step;
  const int first = slice.used ? chunk_index * pixels_per_chunk + slice.pixel : end;
  Tile<T, kVec, kSkip> next;
  next.load(x + begin, skip + begin, first, step, end, channels);

  // Merges the statistics of the chunks: adjacent threads handle adjacent groups, and several threads share a group.
  const int group_in_block = static_cast<int>(threadIdx.x) % groups_per_block;
  const int helper = static_cast<int>(threadIdx.x) / groups_per_block;
  const int helpers = kTwoPassBlock / groups_per_block;
  const float* of_group = moments + 3 * (sample * chunks * groups + blockIdx.y * groups_per_block + group_in_block);
  MomentSums merged(of_group[1]);
#pragma unroll 8
  for (int chunk = helper; chunk < chunks; chunk += helpers) {
    const float* from = of_group + 3 * static_cast<int64_t>(chunk) * groups;
    merged.add(Moments{from[0], from[1], from[2]});
  }
  float* part = parts + 3 * threadIdx.x;
  part[0] = merged.count;
  part[1] = merged.sum;
  part[2] = merged.squares;
  block_barrier();
  if (helper == 0) {
    for (int other = 1; other < helpers; ++other) {
      const float* from = parts + 3 * (other * groups_per_block + group_in_block);
      merged.count += from[0];
      merged.sum += from[1];
      merged.squares += from[2];
    }
    const Moments all = merged.moments();
    means[group_in_block] = all.mean;
    factors[group_in_block] = rsqrtf(all.m2 / all.count + epsilon);
  }
  block_barrier();

  Normalizer<T, kVec> normalizer;
  float offsets[kVec];
  load_offsets(offsets, skip_channels, bias, sample, channels, slice.channel);
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const int group = slice.low_group + (k < slice.low_count ? 0 : 1);
    normalizer.set(k, means[group] - offsets[k],
                   factors[group] * affine_value<T>(gamma, affine_is_float, slice.channel + k),
                   affine_value<T>(beta, affine_is_float, slice.channel + k));
  }
  for (int pixel = first; pixel < end; pixel += next.kPixels * step) {
    const Tile<T, kVec, kSkip> tile = next;
    next.load(x + begin, skip + begin, pixel + tile.kPixels * step, step, end, channels);
#pragma unroll
    for (int i = 0; i < tile.kPixels; ++i) {
      if (pixel + i * step < end) {
        float v[kVec];
        tile.unpack(i, v);
        normalizer.apply(v, activation);
        y.store(begin + static_cast<int64_t>(pixel + i * step) * channels, v);
      }
    }
  }
}

namespace {

template <class T, int kVec>
const char* launch_vectors(const GroupNormParams& p, const GroupNormLaunch& parameters, float* moments, void* stream) {
  const GroupNormArguments<T> a(p);
  const dim3 grid(parameters.chunks, p.groups / parameters.groups_per_block, p.batch);
  const auto statistics =
      a.skip == nullptr ? group_norm_statistics_kernel<T, kVec, false> : group_norm_statistics_kernel<T, kVec, true>;
  const char* error = launch(statistics, grid, dim3(kTwoPassBlock), 0, stream, a.x, a.skip, a.skip_channels, a.bias,
                             a.sum, moments, p.spatial, p.channels, a.channels_per_group, parameters.groups_per_block,
                             parameters.pixels_per_chunk, parameters.chunks);
  if (error != nullptr) return error;
  // If S was stored, it is read instead of its terms.
  const bool stored = a.sum != nullptr;
  const auto apply =
      a.skip == nullptr || stored ? group_norm_apply_kernel<T, kVec, false> : group_norm_apply_kernel<T, kVec, true>;
  return launch(apply, grid, dim3(kTwoPassBlock), 0, stream, stored ? a.sum : a.x, stored ? nullptr : a.skip,
                stored ? nullptr : a.skip_channels, stored ? nullptr : a.bias, p.gamma, p.beta, moments, a.y,
                a.affine_is_float, p.spatial, p.channels, a.channels_per_group, parameters.groups_per_block,
                parameters.pixels_per_chunk, parameters.chunks, p.activation, p.epsilon);
}

}  // namespace

const char* group_norm_two_pass(const GroupNormParams& p, const GroupNormLaunch& parameters, void* workspace,
                                void* stream) {
  return with_vectors(p.dtype, parameters.vector_bytes, [&](auto access) {
    using Access = decltype(access);
    return launch_vectors<typename Access::type, Access::kVec>(p, parameters, static_cast<float*>(workspace), stream);
  });
}

}  // namespace sd_ort
