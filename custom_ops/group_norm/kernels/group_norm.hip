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
// group_norm_cluster_kernel (NVIDIA, compute capability 9): a cluster of blocks takes the span, each block a run of its
//   pixels, kept in LDS between statistics and output as far as they fit; the blocks exchange sums. One read, or
//   nearly. Launch: block (threads, 1, 1), grid (cluster * groups / groups_per_block, batch, 1) in clusters of
//   `cluster` along x, dynamic LDS threads * held * kVec * sizeof(T); needs span % kVec == 0, span / kVec <= threads <=
//   640, groups_per_block <= 32, pixels_per_block * cluster >= spatial.
// group_norm_channels_first_kernel: channels first, a block a group, two reads.
//   Launch: block (512, 1, 1), grid (groups, batch, 1), static LDS only; needs spatial % kVec == 0.
//
// Null pointers: skip, skip_channels (a skip by sample and channel), bias, sum. gamma and beta hold float when
// affine_is_float, T otherwise.
#include <algorithm>

#include "common/cluster.h"
#include "common/gpu.h"
#include "common/math.h"
#include "common/reduce.h"
#include "group_norm/op.h"

namespace sd_ort {

constexpr int kTwoReadBlock = 256;
constexpr int kChannelsFirstBlock = 512;
constexpr int kMaxGroupsPerBlock = 64;
constexpr int kMaxClusterThreads = 640;
constexpr int kMaxClusterGroups = 32;
constexpr int kMaxCluster = 16;

// The sizes that one read is compiled in. They hold 24, 88, 168 and 96 KB.
constexpr GroupNormConfig kOneReadConfigs[] = {{GroupNormConfig::kOneRead, 256, 24, 1},
                                               {GroupNormConfig::kOneRead, 512, 44, 1},
                                               {GroupNormConfig::kOneRead, 512, 84, 1},
                                               {GroupNormConfig::kOneRead, 1024, 24, 1}};

// Two blocks a multiprocessor, one with all LDS, the same for whole pixels, four with less each. Stable Diffusion's
// spans are 5 or 10 times 32 bytes, which 320 and 640 threads take without a rest.
constexpr GroupNormConfig kClusterConfigs[] = {{GroupNormConfig::kCluster, 320, 0, 0, 128, 96 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 128, 200 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 512, 200 * 1024},
                                               {GroupNormConfig::kCluster, 320, 0, 0, 64, 48 * 1024}};

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

// What makes a slice's V its output: (V - mean) * factor + beta, then SiLU when asked. For 16-bit types the mean is
// folded into beta: that costs a roundoff of float32 times mean * factor, and they have thousands of such.
template <class T, int kVec>
struct Normaliser {
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
  uint32_t counted = pixels;
  forget(counted);  // compare with it anew: the masks of all items would take more scalar registers than there are
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float v[kVec];
    held[i].unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (i == 0) sums[k].start(v[k]);
      sums[k].add(i < static_cast<int>(counted) ? v[k] : sums[k].first);  // adds nothing
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

  Normaliser<T, kVec> normaliser;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const bool is_low = k < slice.low_count;
    normaliser.set(k, is_low ? low_mean : high_mean,
                   (is_low ? low_factor : high_factor) * affine_value<T>(gamma, affine_is_float, slice.channel + k),
                   affine_value<T>(beta, affine_is_float, slice.channel + k));
  }
  uint32_t at = offset;
  uint32_t stored = pixels;
  forget(stored);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < static_cast<int>(stored)) {
      float v[kVec];
      forget(held[i].raw);  // unpack it anew: the floats of all items would take twice the registers
      held[i].unpack(v);
      normaliser.apply(v, activation);
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
    int channels_per_group, int groups_per_block, int pixels_per_chunk, int chunks) {
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
  block_barrier();

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
  float* to = moments + 3 * ((sample * chunks + blockIdx.x) * groups + blockIdx.y * groups_per_block + group);
  to[0] = all.count;
  to[1] = all.mean;
  to[2] = all.m2;
}

template <class T, int kVec, bool kSkip>
__global__ __launch_bounds__(kTwoReadBlock) void group_norm_apply_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    const float* moments, T* y, int affine_is_float, int spatial, int channels, int channels_per_group,
    int groups_per_block, int pixels_per_chunk, int chunks, int activation, float epsilon) {
  __shared__ float parts[3 * kTwoReadBlock], means[kMaxGroupsPerBlock], factors[kMaxGroupsPerBlock];
  const int64_t sample = blockIdx.z;
  const int groups = channels / channels_per_group;
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
  block_barrier();
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
  block_barrier();

  Normaliser<T, kVec> normaliser;
  float offsets[kVec];
  load_offsets(offsets, skip_channels, bias, sample, channels, slice.channel);
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const int group = slice.low_group + (k < slice.low_count ? 0 : 1);
    normaliser.set(k, means[group] - offsets[k],
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
        normaliser.apply(v, activation);
        Vec<T, kVec>::pack(v).store(y + begin + static_cast<int64_t>(pixel + i * step) * channels);
      }
    }
  }
}

#if !SD_ORT_HIP
// Sums of a thread's slice in its low and its high group, about a number that all threads of the group take.
struct SliceSums {
  float low, low_squares, high, high_squares;
};

// The group's sums over the block, to the inboxes of all blocks of the cluster; a wave a group.
__device__ inline void exchange_sums(const SliceSums* parts, float2 (*inbox)[kMaxClusterGroups], int groups_per_block,
                                     int channels_per_group, int vec, int slices, int rows, int rank, int cluster) {
  const int lane = static_cast<int>(threadIdx.x) % SD_ORT_WAVE_SIZE;
  const int waves = static_cast<int>(blockDim.x) / SD_ORT_WAVE_SIZE;
  for (int group = static_cast<int>(threadIdx.x) / SD_ORT_WAVE_SIZE; group < groups_per_block; group += waves) {
    float sum = 0.f, squares = 0.f;
    for (int slice = group * channels_per_group / vec; slice * vec < (group + 1) * channels_per_group; ++slice) {
      const bool is_low = slice * vec / channels_per_group == group;
      for (int row = lane; row < rows; row += SD_ORT_WAVE_SIZE) {
        const SliceSums& part = parts[row * slices + slice];
        sum += is_low ? part.low : part.high;
        squares += is_low ? part.low_squares : part.high_squares;
      }
    }
    sum = wave_reduce<Sum>(sum);
    squares = wave_reduce<Sum>(squares);
    if (lane < cluster) store_in_cluster(&inbox[rank][group], lane, {sum, squares});
  }
}

// kPlain: no skip, bias or sum.
template <class T, int kVec, bool kPlain>
__global__ __launch_bounds__(kMaxClusterThreads) void group_norm_cluster_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta, T* y, T* sum,
    int affine_is_float, int spatial, int channels, int channels_per_group, int groups_per_block, int pixels_per_block,
    int cluster, int held, int activation, float epsilon) {
  using Pack = Vec<T, kVec>;
  constexpr int kAhead = kVec * sizeof(T) == 16 ? 4 : 8;  // loads under way
  SD_ORT_DYNAMIC_LDS(Pack, items);                        // item i of a thread: items[i * threads + thread]
  __shared__ SliceSums parts[kMaxClusterThreads];
  __shared__ float2 inbox[kMaxCluster][kMaxClusterGroups];
  __shared__ float origins[kMaxClusterGroups], means[kMaxClusterGroups], factors[kMaxClusterGroups];
  cluster_arrive();

  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int rank = static_cast<int>(blockIdx.x) % cluster, span_index = static_cast<int>(blockIdx.x) / cluster;
  const int64_t sample = blockIdx.y;
  const Slice<kVec> slice(threads, span_index, channels_per_group, groups_per_block);
  const int first = rank * pixels_per_block + slice.pixel, end = min(spatial, (rank + 1) * pixels_per_block);
  const int pixels = slice.used && first < end ? (end - 1 - first) / slice.pixel_step + 1 : 0;
  const int kept = min(pixels, held);
  const int64_t begin = (sample * spatial + first) * channels + slice.channel;
  const uint32_t stride = static_cast<uint32_t>(slice.pixel_step * channels);
  const auto place = [&](int i) { return begin + static_cast<int64_t>(i) * stride; };

  // All that fits is on its way before anything is waited for.
  const int quarter = (kept + 3) / 4;
  if constexpr (kPlain) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      for (int i = q * quarter; i < min((q + 1) * quarter, kept); ++i) {
        copy_async<sizeof(Pack)>(&items[i * threads + thread], x + place(i));
      }
      end_of_copies();
    }
  }
  float offsets[kVec];
  if constexpr (!kPlain) load_offsets(offsets, skip_channels, bias, sample, channels, slice.channel);

  // Sums are taken about a group's first number.
  if (thread < groups_per_block) {
    const int channel = (span_index * groups_per_block + thread) * channels_per_group;
    const int64_t at = sample * spatial * channels + channel;
    float origin = to_float(x[at]);
    if constexpr (!kPlain) {
      origin += bias == nullptr ? 0.f : to_float(bias[channel]);
      if (skip_channels != nullptr) origin += to_float(skip_channels[sample * channels + channel]);
      if (skip != nullptr) origin += to_float(skip[at]);
    }
    origins[thread] = origin;
  }
  block_barrier();
  const float low_origin = origins[slice.low_group];
  const float high_origin = origins[min(slice.low_group + 1, groups_per_block - 1)];
  float origin[kVec], sums[kVec], squares[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    origin[k] = k < slice.low_count ? low_origin : high_origin;
    sums[k] = squares[k] = 0.f;
  }
  const auto count_in = [&](const float(&v)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float distance = v[k] - origin[k];
      sums[k] += distance;
      squares[k] += distance * distance;
    }
  };
  // V of items i to i + kAhead - 1, from where it was stored or from its parts; past the last item comes that again.
  const auto load_ahead = [&](bool stored, int i, Pack(&ahead)[kAhead]) {
    const T* from = stored ? sum : x;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ahead[j] = Pack::load(from + place(min(i + j, pixels - 1)));
    if (kPlain || stored) return;
    Pack other[kAhead];
    if (skip != nullptr) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) other[j] = Pack::load(skip + place(min(i + j, pixels - 1)));
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      float v[kVec], more[kVec];
      ahead[j].unpack(v);
#pragma unroll
      for (int k = 0; k < kVec; ++k) v[k] += offsets[k];
      if (skip != nullptr) {
        other[j].unpack(more);
#pragma unroll
        for (int k = 0; k < kVec; ++k) v[k] += more[k];
      }
      ahead[j] = Pack::pack(v);
    }
  };

  // Statistics: what is not in LDS first, as it is read again from a cache that should still hold what came last.
  for (int i = kPlain ? kept : 0; i < pixels; i += kAhead) {
    Pack ahead[kAhead];
    load_ahead(false, i, ahead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= pixels) break;
      if (!kPlain && sum != nullptr) ahead[j].store(sum + place(i + j));
      if (i + j < kept) items[(i + j) * threads + thread] = ahead[j];
      float v[kVec];
      ahead[j].unpack(v);
      count_in(v);
    }
  }
  if constexpr (kPlain) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (q == 0) wait_for_copies_but<3>();
      if (q == 1) wait_for_copies_but<2>();
      if (q == 2) wait_for_copies_but<1>();
      if (q == 3) wait_for_copies_but<0>();
#pragma unroll 2
      for (int i = q * quarter; i < min((q + 1) * quarter, kept); ++i) {
        float v[kVec];
        items[i * threads + thread].unpack(v);
        count_in(v);
      }
    }
  }
  SliceSums mine = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const bool is_low = k < slice.low_count;
    mine.low += is_low ? sums[k] : 0.f;
    mine.low_squares += is_low ? squares[k] : 0.f;
    mine.high += is_low ? 0.f : sums[k];
    mine.high_squares += is_low ? 0.f : squares[k];
  }
  parts[thread] = mine;
  block_barrier();
  cluster_wait();  // every block runs, so its inbox can be written to
  const int slices = channels_per_group * groups_per_block / kVec;
  exchange_sums(parts, inbox, groups_per_block, channels_per_group, kVec, slices, slice.pixel_step, rank, cluster);
  cluster_arrive();
  float gammas[kVec], betas[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    gammas[k] = affine_value<T>(gamma, affine_is_float, slice.channel + k);
    betas[k] = affine_value<T>(beta, affine_is_float, slice.channel + k);
  }
  cluster_wait();
  if (thread < groups_per_block) {
    float total = 0.f, total_squares = 0.f;
    for (int other = 0; other < cluster; ++other) {
      total += inbox[other][thread].x;
      total_squares += inbox[other][thread].y;
    }
    const float inverse = 1.f / (static_cast<float>(spatial) * channels_per_group);
    const float mean = total * inverse;
    means[thread] = origins[thread] + mean;
    factors[thread] = rsqrtf(fmaxf(total_squares * inverse - mean * mean, 0.f) + epsilon);
  }
  block_barrier();

  const int high_group = min(slice.low_group + 1, groups_per_block - 1);
  const float low_mean = means[slice.low_group], high_mean = means[high_group];
  const float low_factor = factors[slice.low_group], high_factor = factors[high_group];
  Normaliser<T, kVec> normaliser;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const bool is_low = k < slice.low_count;
    normaliser.set(k, is_low ? low_mean : high_mean, gammas[k] * (is_low ? low_factor : high_factor), betas[k]);
  }
  const auto put_out = [&](const Pack& item, int i) {
    float v[kVec];
    item.unpack(v);
    normaliser.apply(v, activation);
    Pack::pack(v).store(y + place(i));
  };
  const int again = (pixels - kept + kAhead - 1) / kAhead;  // times kAhead items, backwards
  for (int i = kept + (again - 1) * kAhead; i >= kept; i -= kAhead) {
    Pack ahead[kAhead];
    load_ahead(!kPlain && sum != nullptr, i, ahead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j < pixels) put_out(ahead[j], i + j);
    }
  }
#pragma unroll 2
  for (int i = 0; i < kept; ++i) put_out(items[i * threads + thread], i);
}
#endif

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
    for (int k = 0; k < kVec; ++k) v[k] = (v[k] - all.mean) * scale + shift;
    if (activation == 1) silu_all(v);
    Pack::pack(v).store(y + begin + at);
  }
}

namespace {

// How a call is cut up: chosen on the host from the shape and a configuration.
struct Plan {
  int vector_bytes = 0;  // 0: impossible
  int groups_per_block = 0;
  int chunks = 0;            // two reads
  int pixels_per_chunk = 0;  // two reads; cluster: a block's
  int cluster = 0;           // cluster: blocks
  int held = 0;              // cluster: items a thread keeps in LDS
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
  if ((bytes == 2 && config.block == 512) || (bytes < 16 && config.registers == 84)) return plan;
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

#if !SD_ORT_HIP
// Clusters of 16 are not promised on every device of compute capability 9: 8 are.
int largest_cluster() {
#if defined(SD_ORT_EMULATED)
  return 4;  // lanes cost time there
#else
  static const int largest = [] {
    const auto kernel = group_norm_cluster_kernel<half_t, 8, true>;
    const void* function = reinterpret_cast<const void*>(kernel);
    constexpr int kLds = 208 * 1024;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kMaxCluster, 1, 1};
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(kMaxCluster);
    launch.blockDim = dim3(kMaxClusterThreads);
    launch.dynamicSmemBytes = kLds;
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    int clusters = 0;
    const bool runs =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kLds) == cudaSuccess &&
        cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, function, &launch) == cudaSuccess && clusters > 0;
    (void)cudaGetLastError();
    return runs ? kMaxCluster : 8;
  }();
  return largest;
#endif
}

// The narrowest span of whole groups with the configuration's bytes a pixel, in whole sectors of 32 bytes if there are
// such; the smallest cluster whose LDS holds all its pixels and that, with the others, fills a large GPU.
Plan plan_cluster(const GroupNormParams& p, const GroupNormConfig& config) {
  constexpr int64_t kFilling = 100, kFewItems = 2;
  Plan plan;
  if (!p.channels_last || p.spatial * p.channels > INT32_MAX || compute_capability() < 9) return plan;
  const int64_t channels_per_group = p.channels / p.groups, size = static_cast<int64_t>(size_of(p.dtype));
  int64_t groups = 0;
  for (bool whole_sectors : {true, false}) {
    for (int64_t g = 1; g <= std::min<int64_t>(p.groups, kMaxClusterGroups) && groups == 0; ++g) {
      const int64_t bytes = g * channels_per_group * size;
      if (p.groups % g == 0 && bytes >= config.span_bytes && (!whole_sectors || bytes % 32 == 0)) groups = g;
    }
  }
  if (groups == 0) groups = p.groups <= kMaxClusterGroups ? p.groups : 1;
  const int bytes = widest_access(p, groups * channels_per_group, 16);
  const int64_t slices = groups * channels_per_group * size / bytes;
  if (bytes < 4 || slices > config.block) return plan;
  const int64_t rows = config.block / slices, capacity = config.lds_bytes / (config.block * bytes);
  int cluster = 1;
  for (; cluster < largest_cluster(); cluster *= 2) {
    const int64_t items = ceil_div(ceil_div(p.spatial, cluster), rows);
    const bool fills = p.batch * (p.groups / groups) * cluster >= kFilling || items <= kFewItems;
    if (items <= capacity && fills) break;
  }
  plan.vector_bytes = bytes;
  plan.groups_per_block = static_cast<int>(groups);
  plan.cluster = cluster;
  plan.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, cluster));
  plan.held = static_cast<int>(std::min(ceil_div(plan.pixels_per_chunk, rows), capacity));
  return plan;
}
#endif

// Whether a cluster is the default: all its pixels fit, and there is little enough that the second read of the other
// way costs more than what clusters spend on meeting. With a skip both ways read and write twice as much.
bool takes_clusters(const GroupNormParams& p) {
#if SD_ORT_HIP
  return false;
#else
  constexpr int64_t kFewElements = 8 << 20;
  const GroupNormConfig& config = kClusterConfigs[0];
  const Plan plan = plan_cluster(p, config);
  if (plan.vector_bytes < 8) return false;
  const int64_t slices = plan.groups_per_block * (p.channels / p.groups) * size_of(p.dtype) / plan.vector_bytes;
  const bool fits = plan.held * (config.block / slices) >= plan.pixels_per_chunk;
  return fits && (p.skip == nullptr || p.batch * p.spatial * p.channels <= kFewElements);
#endif
}

// The default, as measured on an H200 (results/ops_sm_90.md): one read by a block where a pixel's part of the group is
// whole 8-byte accesses and the group fits the smallest block, or the next one when two neighbouring groups make
// accesses wider and leave enough blocks; a cluster where that fits; one read by a larger block; two reads.
GroupNormConfig choose(const GroupNormParams& p) {
  constexpr int64_t kEnoughBlocks = 96;
  for (GroupNormConfig config : kOneReadConfigs) {
    const bool smallest = config.block == kOneReadConfigs[0].block;
    const Plan single = plan_one_read(p, config);
    config.groups_per_block = 2;
    const Plan pair = plan_one_read(p, config);
    if (pair.vector_bytes > single.vector_bytes && pair.vector_bytes == 16 && p.batch * p.groups / 2 >= kEnoughBlocks) {
      return config;
    }
    config.groups_per_block = 1;
    if (single.vector_bytes >= 8 && (smallest || !takes_clusters(p))) return config;
  }
  if (takes_clusters(p)) return kClusterConfigs[0];
  return {GroupNormConfig::kTwoReads};
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
  if constexpr (kBytes == 16) {
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
             p.spatial, p.channels, a.channels_per_group, plan.groups_per_block, plan.pixels_per_chunk, plan.chunks);
  if (error != nullptr) return error;
  // When S was stored it is read instead of its parts.
  const bool stored = a.sum != nullptr;
  const auto apply =
      a.skip == nullptr || stored ? group_norm_apply_kernel<T, kVec, false> : group_norm_apply_kernel<T, kVec, true>;
  return launch(apply, grid, dim3(kTwoReadBlock), 0, stream, stored ? a.sum : a.x, stored ? nullptr : a.skip,
                stored ? nullptr : a.skip_channels, stored ? nullptr : a.bias, p.gamma, p.beta, moments, a.y,
                a.affine_is_float, p.spatial, p.channels, a.channels_per_group, plan.groups_per_block,
                plan.pixels_per_chunk, plan.chunks, p.activation, p.epsilon);
}

#if !SD_ORT_HIP
template <class T, int kVec>
const char* launch_cluster(const GroupNormParams& p, const GroupNormConfig& config, const Plan& plan, void* stream) {
  const Arguments<T> a(p);
  const bool plain = p.skip == nullptr && a.bias == nullptr && a.sum == nullptr;
  const auto kernel = plain ? group_norm_cluster_kernel<T, kVec, true> : group_norm_cluster_kernel<T, kVec, false>;
  const dim3 grid(plan.cluster * p.groups / plan.groups_per_block, p.batch);
  const size_t lds_bytes = static_cast<size_t>(config.block) * plan.held * kVec * sizeof(T);
  return launch_clusters(kernel, grid, dim3(config.block), plan.cluster, lds_bytes, stream, a.x, a.skip,
                         a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial, p.channels,
                         a.channels_per_group, plan.groups_per_block, plan.pixels_per_chunk, plan.cluster, plan.held,
                         p.activation, p.epsilon);
}
#endif

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
#if !SD_ORT_HIP
  if constexpr (kVec * sizeof(T) >= 4) {
    if (config.kernel == GroupNormConfig::kCluster) return launch_cluster<T, kVec>(p, config, plan, stream);
  }
#endif
  if (config.kernel == GroupNormConfig::kOneRead) return launch_one_read<T, kVec>(p, config, plan, stream);
  return launch_two_reads<T, kVec>(p, plan, workspace, stream);
}

GroupNormConfig resolve(const GroupNormParams& p, const GroupNormConfig& config) {
  return config.kernel == GroupNormConfig::kDefault ? choose(p) : config;
}

Plan make_plan(const GroupNormParams& p, const GroupNormConfig& config) {
#if !SD_ORT_HIP
  if (config.kernel == GroupNormConfig::kCluster) return plan_cluster(p, config);
#endif
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

std::vector<GroupNormConfig> group_norm_configs() {
  std::vector<GroupNormConfig> configs = {{GroupNormConfig::kDefault}, {GroupNormConfig::kTwoReads}};
  for (GroupNormConfig config : kOneReadConfigs) {
    for (int groups : {1, 2, 4}) {
      config.groups_per_block = groups;
      configs.push_back(config);
    }
  }
#if !SD_ORT_HIP
  configs.insert(configs.end(), std::begin(kClusterConfigs), std::end(kClusterConfigs));
#endif
  return configs;
}

bool group_norm_supports(const GroupNormParams& p, const GroupNormConfig& config) {
  if (config.kernel == GroupNormConfig::kDefault) return !p.channels_last || plan_two_reads(p).vector_bytes > 0;
  return p.channels_last && p.spatial > 0 && make_plan(p, config).vector_bytes > 0;
}

size_t group_norm_workspace(const GroupNormParams& p, const GroupNormConfig& given) {
  if (!p.channels_last || p.spatial == 0 || resolve(p, given).kernel != GroupNormConfig::kTwoReads) return 0;
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
