// GroupNorm and SkipGroupNorm on a GPU. Bandwidth bound.
//
// Channels last, a block takes `groups_per_block` neighbouring groups of a sample: a span of channels, of which each
// thread keeps one slice of kVec for all its pixels. So a thread's gamma, beta and groups never change, and a slice
// lies in at most two groups (kVec <= channels_per_group).
//
// group_norm_one_read_kernel: all pixels of the span stay in registers between statistics and output.
//   Launch: block (kBlock, 1, 1), grid (groups / groups_per_block, batch, 1), static LDS only;
//   needs span % kVec == 0 and spatial <= kItems * (kBlock / (span / kVec)), span = groups_per_block *
//   channels_per_group.
// group_norm_statistics_kernel, then group_norm_apply_kernel: a first read for the statistics of each chunk of pixels,
//   into `moments`; a second one, chunks backwards so that it begins with what the cache still holds, for the output.
//   Launch of both: block (256, 1, 1), grid (ceil(spatial / pixels_per_chunk), groups / groups_per_block, batch),
//   static LDS only; needs span % kVec == 0, span / kVec <= 256, groups_per_block <= 64.
//   moments: 3 floats (count, mean, squared distances) by sample, chunk and group.
// group_norm_channels_first_kernel: channels first, a block a group, two reads.
//   Launch: block (512, 1, 1), grid (groups, batch, 1), static LDS only; needs spatial % kVec == 0.
//
// Null pointers: skip, skip_channels (a skip by sample and channel), bias, sum. gamma and beta hold float when
// affine_is_float, T otherwise.
#include <algorithm>

#include "common/gpu.h"
#include "common/math.h"
#include "common/reduce.h"
#include "group_norm/op.h"

namespace sd_ort {

constexpr int kTwoReadBlock = 256;
constexpr int kChannelsFirstBlock = 512;
constexpr int kMaxGroupsPerBlock = 64;

template <class T>
__device__ inline float affine_value(const void* values, int affine_is_float, int channel) {
  return affine_is_float ? static_cast<const float*>(values)[channel]
                         : to_float(static_cast<const T*>(values)[channel]);
}

// Which slice of its block's span a thread keeps, and from which pixel on.
template <int kVec>
struct Slice {
  int channel;    // first of the slice, in the sample
  int in_span;    // the same, in the span
  int low_group;  // group of the first element, in the span
  int low_count;  // elements in that group; the rest lie in the next one
  int pixel;      // this thread's first
  int pixel_step;
  bool used;  // false for the threads that are left over

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

// What skip_channels and bias add to each channel of a slice.
template <class T, int kVec>
__device__ inline void load_offsets(float (&offsets)[kVec], const T* skip_channels, const T* bias, int64_t sample,
                                    int channels, int channel) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    offsets[k] = bias == nullptr ? 0.f : to_float(bias[channel + k]);
    if (skip_channels != nullptr) offsets[k] += to_float(skip_channels[sample * channels + channel + k]);
  }
}

// The moments of a thread's slice in its two groups, from the sums of each of its channels over `pixels` pixels.
template <int kVec>
struct SliceMoments {
  Moments low = Moments::none();
  Moments high = Moments::none();

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

// (v - mean) * factor + beta, then SiLU when asked.
__device__ inline float normalise(float v, float mean, float factor, float beta, int activation) {
  const float y = (v - mean) * factor + beta;
  return activation == 1 ? silu(y) : y;
}

template <class T, int kVec, int kItems, int kBlock>
__global__ __launch_bounds__(kBlock) void group_norm_one_read_kernel(const T* x, const T* skip, const T* skip_channels,
                                                                     const T* bias, const void* gamma, const void* beta,
                                                                     T* y, T* sum, int affine_is_float, int spatial,
                                                                     int channels, int channels_per_group,
                                                                     int groups_per_block, int activation,
                                                                     float epsilon) {
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(kBlock)];
  const Slice<kVec> slice(kBlock, blockIdx.x, channels_per_group, groups_per_block);
  const int64_t sample = blockIdx.y;
  const int pixels = slice.used && slice.pixel < spatial ? (spatial - 1 - slice.pixel) / slice.pixel_step + 1 : 0;
  // Threads with fewer items load their last one again, those with none some other's: loads without branches keep the
  // registers few.
  const int last = max(pixels, 1) - 1;
  // Items lie at a place that is the same for the whole block plus an offset of the thread, 32 bits wide.
  const int64_t begin =
      sample * spatial * channels + static_cast<int64_t>(blockIdx.x) * groups_per_block * channels_per_group;
  const uint32_t stride = static_cast<uint32_t>(slice.pixel_step * channels);
  const uint32_t offset = static_cast<uint32_t>(min(slice.pixel, spatial - 1) * channels + slice.in_span);

  Pack held[kItems];
  if (skip == nullptr && skip_channels == nullptr && bias == nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) held[i] = Pack::load(x + begin + (offset + min(i, last) * stride));
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
      held[i] = Pack::pack(v);
      if (sum != nullptr && i < pixels) held[i].store(sum + begin + at);
    }
  }

  ShiftedSums sums[kVec];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float v[kVec];
    held[i].unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (i == 0) sums[k].start(v[k]);
      sums[k].add(i < pixels ? v[k] : sums[k].first);  // adds nothing
    }
  }
  const SliceMoments<kVec> mine(sums, slice.low_count, pixels);

  const float count = static_cast<float>(spatial) * channels_per_group;
  float low_mean = 0.f, high_mean = 0.f, low_factor = 0.f, high_factor = 0.f;
  for (int group = 0; group < groups_per_block; ++group) {
    const Moments& part = group == slice.low_group       ? mine.low
                          : group == slice.low_group + 1 ? mine.high
                                                         : Moments::none();
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

  float mean[kVec], factor[kVec], shift[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    mean[k] = k < slice.low_count ? low_mean : high_mean;
    factor[k] =
        (k < slice.low_count ? low_factor : high_factor) * affine_value<T>(gamma, affine_is_float, slice.channel + k);
    shift[k] = affine_value<T>(beta, affine_is_float, slice.channel + k);
  }
  uint32_t at = offset;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < pixels) {
      float v[kVec];
      forget(held[i].raw);  // unpack it anew: the floats of all items would take twice the registers
      held[i].unpack(v);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] = normalise(v[k], mean[k], factor[k], shift[k], activation);
      Pack::pack(v).store(y + begin + at);
      at += stride;
    }
  }
}

// The next pixels of a thread's slice, loaded while those before are worked on. Past the end the last one comes again:
// loads without branches keep the registers few.
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
__global__ __launch_bounds__(kTwoReadBlock) void group_norm_statistics_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, T* sum, float* moments, int spatial, int channels,
    int channels_per_group, int groups_per_block, int pixels_per_chunk) {
  __shared__ float parts[6 * kTwoReadBlock];  // of each thread: low, then high
  const Slice<kVec> slice(kTwoReadBlock, blockIdx.y, channels_per_group, groups_per_block);
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
      if (sum != nullptr) Vec<T, kVec>::pack(v).unpack(v);  // what is normalised is what S holds
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        if (i == 0 && pixel == first) sums[k].start(v[k]);
        sums[k].add(in_range ? v[k] : sums[k].first);  // adds nothing past the end
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
  __syncthreads();

  // One thread a group gathers from the slices that touch it.
  const int group = static_cast<int>(threadIdx.x);
  if (group >= groups_per_block) return;
  const int slices = channels_per_group * groups_per_block / kVec;
  const int rows = kTwoReadBlock / slices;
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
  float* to = moments + 3 * ((sample * gridDim.x + blockIdx.x) * groups + blockIdx.y * groups_per_block + group);
  to[0] = all.count;
  to[1] = all.mean;
  to[2] = all.m2;
}

template <class T, int kVec, bool kSkip>
__global__ __launch_bounds__(kTwoReadBlock) void group_norm_apply_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    const float* moments, T* y, int affine_is_float, int spatial, int channels, int channels_per_group,
    int groups_per_block, int pixels_per_chunk, int activation, float epsilon) {
  __shared__ float parts[3 * kTwoReadBlock], means[kMaxGroupsPerBlock], factors[kMaxGroupsPerBlock];
  const int64_t sample = blockIdx.z;
  const int groups = channels / channels_per_group;
  const int chunks = static_cast<int>(gridDim.x);
  const Slice<kVec> slice(kTwoReadBlock, blockIdx.y, channels_per_group, groups_per_block);
  const int64_t begin = sample * spatial * channels + slice.channel;
  const int chunk_here = chunks - 1 - static_cast<int>(blockIdx.x);
  const int end = min(spatial, (chunk_here + 1) * pixels_per_chunk);
  const int step = slice.pixel_step;
  const int first = slice.used ? chunk_here * pixels_per_chunk + slice.pixel : end;
  Tile<T, kVec, kSkip> next;
  next.load(x + begin, skip + begin, first, step, end, channels);

  // Merge the chunks' statistics: neighbouring threads take neighbouring groups, and several threads share a group.
  const int group_here = static_cast<int>(threadIdx.x) % groups_per_block;
  const int helper = static_cast<int>(threadIdx.x) / groups_per_block;
  const int helpers = kTwoReadBlock / groups_per_block;
  const float* of_group = moments + 3 * (sample * chunks * groups + blockIdx.y * groups_per_block + group_here);
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
  __syncthreads();
  if (helper == 0) {
    for (int other = 1; other < helpers; ++other) {
      const float* from = parts + 3 * (other * groups_per_block + group_here);
      merged.count += from[0];
      merged.sum += from[1];
      merged.squares += from[2];
    }
    const Moments all = merged.moments();
    means[group_here] = all.mean;
    factors[group_here] = rsqrtf(all.m2 / all.count + epsilon);
  }
  __syncthreads();

  float mean[kVec], factor[kVec], shift[kVec];
  load_offsets(shift, skip_channels, bias, sample, channels, slice.channel);
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const int group = slice.low_group + (k < slice.low_count ? 0 : 1);
    mean[k] = means[group] - shift[k];
    factor[k] = factors[group] * affine_value<T>(gamma, affine_is_float, slice.channel + k);
    shift[k] = affine_value<T>(beta, affine_is_float, slice.channel + k);
  }
  for (int pixel = first; pixel < end; pixel += next.kPixels * step) {
    const Tile<T, kVec, kSkip> tile = next;
    next.load(x + begin, skip + begin, pixel + tile.kPixels * step, step, end, channels);
#pragma unroll
    for (int i = 0; i < tile.kPixels; ++i) {
      if (pixel + i * step < end) {
        float v[kVec];
        tile.unpack(i, v);
#pragma unroll
        for (int k = 0; k < kVec; ++k) v[k] = normalise(v[k], mean[k], factor[k], shift[k], activation);
        Vec<T, kVec>::pack(v).store(y + begin + static_cast<int64_t>(pixel + i * step) * channels);
      }
    }
  }
}

template <class T, int kVec>
__global__ __launch_bounds__(kChannelsFirstBlock) void group_norm_channels_first_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta, T* y, T* sum,
    int affine_is_float, int spatial, int channels, int channels_per_group, int activation, float epsilon) {
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
      Pack::load(sum + begin + at).unpack(v);  // this thread's own store
    } else {
      load(at, v);
    }
    const int channel = first_channel + static_cast<int>(at / spatial);
    const float scale = factor * affine_value<T>(gamma, affine_is_float, channel);
    const float shift = affine_value<T>(beta, affine_is_float, channel);
#pragma unroll
    for (int k = 0; k < kVec; ++k) v[k] = normalise(v[k], all.mean, scale, shift, activation);
    Pack::pack(v).store(y + begin + at);
  }
}

namespace {

// How a call is cut up: chosen on the host from the shape and a configuration.
struct Plan {
  int vector_bytes = 0;  // 0: impossible
  int groups_per_block = 0;
  int chunks = 0;            // two reads
  int pixels_per_chunk = 0;  // two reads
};

bool takes_bytes(const GroupNormParams& p, int bytes) {
  return bytes == static_cast<int>(size_of(p.dtype)) ||
         (p.channels * size_of(p.dtype) % bytes == 0 && are_aligned<16>(p.x, p.skip, p.y, p.sum));
}

// Widest access, at most `limit` bytes, that fits a span of groups: no slice crosses the span's end or touches three
// groups.
int widest_access(const GroupNormParams& p, int64_t span, int limit) {
  const int size = static_cast<int>(size_of(p.dtype));
  for (int bytes = limit; bytes > size; bytes /= 2) {
    if (span * size % bytes == 0 && bytes / size <= p.channels / p.groups && takes_bytes(p, bytes)) return bytes;
  }
  return size;
}

constexpr int items_of(int registers, int vector_bytes) {
  return vector_bytes >= 4 ? registers * 4 / vector_bytes : registers;
}

int64_t items_needed(const GroupNormParams& p, const GroupNormConfig& config, int vector_bytes) {
  const int64_t span = config.groups_per_block * (p.channels / p.groups);
  const int64_t slices = span * size_of(p.dtype) / vector_bytes;
  return slices > config.block ? INT64_MAX : ceil_div(p.spatial, config.block / slices);
}

Plan plan_one_read(const GroupNormParams& p, const GroupNormConfig& config) {
  Plan plan;
  if (!p.channels_last || p.groups % config.groups_per_block != 0) return plan;
  if (p.spatial * p.channels > INT32_MAX) return plan;  // offsets within a sample are 32 bits wide
  const int bytes = widest_access(p, config.groups_per_block * (p.channels / p.groups), 16);
  // narrow accesses are not worth instances with many of them
  if ((bytes == 2 && config.block == 512) || (bytes == 4 && config.registers == 84)) return plan;
  if (items_needed(p, config, bytes) > items_of(config.registers, bytes)) return plan;
  plan.vector_bytes = bytes;
  plan.groups_per_block = config.groups_per_block;
  return plan;
}

// Spans as wide as a block takes; chunks enough to fill a large GPU, few enough that merging their moments is cheap.
Plan plan_two_reads(const GroupNormParams& p) {
  constexpr int64_t kBlocks = 384, kMaxChunks = 256, kPixelsPerThread = 8;
  Plan plan;
  const int64_t channels_per_group = p.channels / p.groups;
  const int size = static_cast<int>(size_of(p.dtype));
  for (int64_t groups = std::min<int64_t>(p.groups, kMaxGroupsPerBlock); groups > 0; --groups) {
    if (p.groups % groups != 0) continue;
    const int bytes = widest_access(p, groups * channels_per_group, 16);
    const int64_t slices = groups * channels_per_group * size / bytes;
    if (slices > kTwoReadBlock) continue;
    const int64_t rows = kTwoReadBlock / slices;
    const int64_t filling = ceil_div(kBlocks, p.batch * (p.groups / groups));
    const int64_t chunks = std::min({filling, kMaxChunks, ceil_div(p.spatial, rows * kPixelsPerThread)});
    plan.vector_bytes = bytes;
    plan.groups_per_block = static_cast<int>(groups);
    plan.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, chunks));
    plan.chunks = static_cast<int>(ceil_div(p.spatial, plan.pixels_per_chunk));
    break;
  }
  return plan;
}

// The default: one read where a pixel's part of the group is whole 8-byte accesses and the group fits the smallest
// block it can; two neighbouring groups a block when that makes accesses wider and leaves enough blocks. Narrower
// accesses waste more than a second read. Measured on an H200 (results/ops_bandwidth_sm_90.md).
GroupNormConfig choose(const GroupNormParams& p) {
  constexpr int64_t kEnoughBlocks = 96;
  for (GroupNormConfig config : kOneReadConfigs) {
    const Plan single = plan_one_read(p, config);
    config.groups_per_block = 2;
    const Plan pair = plan_one_read(p, config);
    if (pair.vector_bytes > single.vector_bytes && pair.vector_bytes == 16 && p.batch * p.groups / 2 >= kEnoughBlocks) {
      return config;
    }
    config.groups_per_block = 1;
    if (single.vector_bytes >= 8) return config;
  }
  return {GroupNormConfig::kTwoReads, kTwoReadBlock, 0, 0};
}

// The arguments that all kernels take, in T.
template <class T>
struct Arguments {
  const T* x;
  const T* skip;
  const T* skip_channels;
  const T* bias;
  T* y;
  T* sum;
  int affine_is_float;
  int channels_per_group;

  explicit Arguments(const GroupNormParams& p)
      : x(static_cast<const T*>(p.x)),
        skip(p.skip_broadcast ? nullptr : static_cast<const T*>(p.skip)),
        skip_channels(p.skip_broadcast ? static_cast<const T*>(p.skip) : nullptr),
        bias(static_cast<const T*>(p.bias)),
        y(static_cast<T*>(p.y)),
        sum(static_cast<T*>(p.sum)),
        affine_is_float(p.affine_dtype == DType::kFloat32),
        channels_per_group(static_cast<int>(p.channels / p.groups)) {}
};

template <class T, int kVec, int kItems, int kBlock>
const char* launch_one_read(const GroupNormParams& p, const Plan& plan, void* stream) {
  const Arguments<T> a(p);
  return launch(group_norm_one_read_kernel<T, kVec, kItems, kBlock>, dim3(p.groups / plan.groups_per_block, p.batch),
                dim3(kBlock), 0, stream, a.x, a.skip, a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum,
                a.affine_is_float, p.spatial, p.channels, a.channels_per_group, plan.groups_per_block, p.activation,
                p.epsilon);
}

template <class T, int kVec>
const char* launch_one_read(const GroupNormParams& p, const GroupNormConfig& config, const Plan& plan, void* stream) {
  constexpr int kBytes = kVec * sizeof(T);
  if (config.block == 1024) return launch_one_read<T, kVec, items_of(24, kBytes), 1024>(p, plan, stream);
  if (config.block == 256) return launch_one_read<T, kVec, items_of(24, kBytes), 256>(p, plan, stream);
  if constexpr (kBytes > 2) {
    if (config.registers == 44) return launch_one_read<T, kVec, items_of(44, kBytes), 512>(p, plan, stream);
  }
  if constexpr (kBytes > 4) {
    if (config.registers == 84) return launch_one_read<T, kVec, items_of(84, kBytes), 512>(p, plan, stream);
  }
  return "no instance of this size";
}

template <class T, int kVec>
const char* launch_two_reads(const GroupNormParams& p, const Plan& plan, void* workspace, void* stream) {
  const Arguments<T> a(p);
  const dim3 grid(plan.chunks, p.groups / plan.groups_per_block, p.batch);
  float* moments = static_cast<float*>(workspace);
  const auto statistics =
      a.skip == nullptr ? group_norm_statistics_kernel<T, kVec, false> : group_norm_statistics_kernel<T, kVec, true>;
  const char* error =
      launch(statistics, grid, dim3(kTwoReadBlock), 0, stream, a.x, a.skip, a.skip_channels, a.bias, a.sum, moments,
             p.spatial, p.channels, a.channels_per_group, plan.groups_per_block, plan.pixels_per_chunk);
  if (error != nullptr) return error;
  // When S was stored it is read instead of its parts.
  const bool stored = a.sum != nullptr;
  const auto apply =
      a.skip == nullptr || stored ? group_norm_apply_kernel<T, kVec, false> : group_norm_apply_kernel<T, kVec, true>;
  return launch(apply, grid, dim3(kTwoReadBlock), 0, stream, stored ? a.sum : a.x, stored ? nullptr : a.skip,
                stored ? nullptr : a.skip_channels, stored ? nullptr : a.bias, p.gamma, p.beta, moments, a.y,
                a.affine_is_float, p.spatial, p.channels, a.channels_per_group, plan.groups_per_block,
                plan.pixels_per_chunk, p.activation, p.epsilon);
}

template <class T, int kVec>
const char* launch_channels_first(const GroupNormParams& p, void* stream) {
  const Arguments<T> a(p);
  return launch(group_norm_channels_first_kernel<T, kVec>, dim3(p.groups, p.batch), dim3(kChannelsFirstBlock), 0,
                stream, a.x, a.skip, a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial,
                p.channels, a.channels_per_group, p.activation, p.epsilon);
}

template <class T, int kVec>
const char* launch_channels_last(const GroupNormParams& p, const GroupNormConfig& config, const Plan& plan,
                                 void* workspace, void* stream) {
  if (config.kernel == GroupNormConfig::kOneRead) return launch_one_read<T, kVec>(p, config, plan, stream);
  return launch_two_reads<T, kVec>(p, plan, workspace, stream);
}

GroupNormConfig resolve(const GroupNormParams& p, const GroupNormConfig& config) {
  return config.kernel == GroupNormConfig::kDefault ? choose(p) : config;
}

Plan make_plan(const GroupNormParams& p, const GroupNormConfig& config) {
  return config.kernel == GroupNormConfig::kOneRead ? plan_one_read(p, config) : plan_two_reads(p);
}

template <class T>
const char* launch_type(const GroupNormParams& p, const GroupNormConfig& given, void* workspace, void* stream) {
  if (p.batch * p.spatial == 0) return nullptr;
  if (p.spatial > INT32_MAX || p.channels > INT32_MAX || p.batch > 65535) return "the tensor is too large";
  constexpr int kWide = 16 / sizeof(T);
  if (!p.channels_last) {
    const bool vectors =
        p.spatial % kWide == 0 && are_aligned<16>(p.x, p.skip_broadcast ? nullptr : p.skip, p.y, p.sum);
    return vectors ? launch_channels_first<T, kWide>(p, stream) : launch_channels_first<T, 1>(p, stream);
  }
  const GroupNormConfig config = resolve(p, given);
  const Plan plan = make_plan(p, config);
  switch (plan.vector_bytes) {
    case 16:
      return launch_channels_last<T, kWide>(p, config, plan, workspace, stream);
    case 8:
      return launch_channels_last<T, kWide / 2>(p, config, plan, workspace, stream);
    case 4:
      return launch_channels_last<T, kWide / 4>(p, config, plan, workspace, stream);
    case 2:
      return launch_channels_last<T, 1>(p, config, plan, workspace, stream);
    default:
      return "a group has more channels than a block takes";
  }
}

}  // namespace

bool group_norm_supports(const GroupNormParams& p, const GroupNormConfig& config) {
  if (config.kernel == GroupNormConfig::kDefault) return !p.channels_last || plan_two_reads(p).vector_bytes > 0;
  return p.channels_last && p.spatial > 0 && make_plan(p, config).vector_bytes > 0;
}

size_t group_norm_workspace(const GroupNormParams& p, const GroupNormConfig& given) {
  if (!p.channels_last || p.spatial == 0 || resolve(p, given).kernel == GroupNormConfig::kOneRead) return 0;
  return p.batch * plan_two_reads(p).chunks * p.groups * 3 * sizeof(float);
}

const char* group_norm_launch(const GroupNormParams& p, const GroupNormConfig& config, void* workspace, void* stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_type<float>(p, config, workspace, stream);
    case DType::kFloat16:
      return launch_type<half_t>(p, config, workspace, stream);
    default:
      return launch_type<bf16_t>(p, config, workspace, stream);
  }
}

}  // namespace sd_ort
