// GroupNorm by clusters, channels last (NVIDIA, compute capability 9): a cluster of blocks computes a span, each block
// a range of its pixels, lds_count in LDS between statistics and output as far as they fit; the blocks exchange sums.
//
// Launch: block (threads, 1, 1), grid (cluster * groups / groups_per_block, batch, 1) in clusters of `cluster` along x,
// dynamic LDS threads * lds_items * kVec * sizeof(T); needs span % kVec == 0, span / kVec <= threads <= 640,
// groups_per_block <= 32, pixels_per_block * cluster >= spatial.
#include "common/cluster.h"
#include "operators/group_norm/kernels/span.h"

namespace sd_ort {
#if SD_ORT_HAS_CLUSTERS

constexpr int kMaxClusterThreads = 640;
constexpr int kMaxClusterGroups = GroupNormLaunch::kMaxClusterGroups;
constexpr int kMaxCluster = 16;

// Sums of a thread's slice in its low and high group, shifted by the origin of the group.
struct SliceSums {
  float low, low_squares, high, high_squares;
};

// Reduces the sums of each group over the block, one wave per group, and sends them to all blocks of the cluster.
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

// V of the first element of a group, in channel `channel`.
template <class T, bool kXOnly>
__device__ __forceinline__ float first_value(const T* x, const T* skip, const T* skip_channels, const T* bias,
                                             int64_t sample, int spatial, int channels, int channel) {
  const int64_t at = sample * spatial * channels + channel;
  float number = to_float(x[at]);
  if constexpr (!kXOnly) {
    number += bias == nullptr ? 0.f : to_float(bias[channel]);
    if (skip_channels != nullptr) number += to_float(skip_channels[sample * channels + channel]);
    if (skip != nullptr) number += to_float(skip[at]);
  }
  return number;
}

// Computes mean and 1 / standard deviation of each group from the sums of the cluster. Ends with a barrier.
__device__ __forceinline__ void finish_statistics(const float2 (*inbox)[kMaxClusterGroups], const float* origins,
                                                  int groups_per_block, int cluster, float count, float epsilon,
                                                  float* means, float* factors) {
  const int group = static_cast<int>(threadIdx.x);
  if (group < groups_per_block) {
    float total = 0.f, total_squares = 0.f;
    for (int other = 0; other < cluster; ++other) {
      total += inbox[other][group].x;
      total_squares += inbox[other][group].y;
    }
    const float inverse = 1.f / count;
    const float mean = total * inverse;
    means[group] = origins[group] + mean;
    factors[group] = rsqrtf(fmaxf(total_squares * inverse - mean * mean, 0.f) + epsilon);
  }
  block_barrier();
}

// Pixels of a thread's slice in global memory. kXOnly: no skip, bias or sum.
template <class T, int kVec, bool kXOnly>
struct ItemsOfThread {
  static constexpr int kAhead = kVec * sizeof(T) == 16 ? 4 : 8;  // loads in flight
  using Pack = Vec<T, kVec>;

  const T* x;
  const T* skip;
  const T* sum;
  int64_t begin;
  uint32_t stride;
  int pixels;
  float offsets[kVec];  // of bias and skip_channels, unless kXOnly

  __device__ int64_t place(int i) const { return begin + static_cast<int64_t>(i) * stride; }

  // Loads V of items i to i + kAhead - 1, from S or from its terms. Indices past the last item load the last one.
  __device__ __forceinline__ void load_ahead(bool stored, int i, Pack (&ahead)[kAhead]) const {
    const T* from = stored ? sum : x;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ahead[j] = Pack::load(from + place(min(i + j, pixels - 1)));
    if (kXOnly || stored) return;
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
  }
};

// kXOnly: no skip, bias or sum.
template <class T, int kVec, bool kXOnly>
__global__ __launch_bounds__(kMaxClusterThreads) void group_norm_cluster_kernel(
    const T* x, const T* skip, const T* skip_channels, const T* bias, const void* gamma, const void* beta,
    QuantizedOutput<T> y, T* sum, int affine_is_float, int spatial, int channels, int channels_per_group,
    int groups_per_block, int pixels_per_block, int cluster, int lds_items, int activation, float epsilon) {
  wait_for_predecessor();
  using Pack = Vec<T, kVec>;
  constexpr int kAhead = ItemsOfThread<T, kVec, kXOnly>::kAhead;
  SD_ORT_DYNAMIC_LDS(Pack, items);  // item i of a thread: items[i * threads + thread]
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
  const int lds_count = min(pixels, lds_items);
  const int64_t begin = (sample * spatial + first) * channels + slice.channel;
  const uint32_t stride = static_cast<uint32_t>(slice.pixel_step * channels);
  const auto place = [&](int i) { return begin + static_cast<int64_t>(i) * stride; };

  // Starts all copies that fit in LDS.
  const int quarter = (lds_count + 3) / 4;
  if constexpr (kXOnly) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      for (int i = q * quarter; i < min((q + 1) * quarter, lds_count); ++i) {
        copy_async<sizeof(Pack)>(&items[i * threads + thread], x + place(i));
      }
      commit_copies();
    }
  }
  ItemsOfThread<T, kVec, kXOnly> global_items = {x, skip, sum, begin, stride, pixels};
  if constexpr (!kXOnly) load_offsets(global_items.offsets, skip_channels, bias, sample, channels, slice.channel);

  if (thread < groups_per_block) {  // sums are shifted by the first element of the group
    const int channel = (span_index * groups_per_block + thread) * channels_per_group;
    origins[thread] = first_value<T, kXOnly>(x, skip, skip_channels, bias, sample, spatial, channels, channel);
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
  const auto accumulate = [&](const float(&v)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float distance = v[k] - origin[k];
      sums[k] += distance;
      squares[k] += distance * distance;
    }
  };
  // Statistics: items outside of LDS first, the last of which are likely still cached for the second read.
  for (int i = kXOnly ? lds_count : 0; i < pixels; i += kAhead) {
    Pack ahead[kAhead];
    global_items.load_ahead(false, i, ahead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= pixels) break;
      if (!kXOnly && sum != nullptr) ahead[j].store(sum + place(i + j));
      if (i + j < lds_count) items[(i + j) * threads + thread] = ahead[j];
      float v[kVec];
      ahead[j].unpack(v);
      accumulate(v);
    }
  }
  if constexpr (kXOnly) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (q == 0) wait_for_copies<3>();
      if (q == 1) wait_for_copies<2>();
      if (q == 2) wait_for_copies<1>();
      if (q == 3) wait_for_copies<0>();
#pragma unroll 2
      for (int i = q * quarter; i < min((q + 1) * quarter, lds_count); ++i) {
        float v[kVec];
        items[i * threads + thread].unpack(v);
        accumulate(v);
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
  cluster_wait();  // all blocks are running, so their inboxes are writable
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
  finish_statistics(inbox, origins, groups_per_block, cluster, static_cast<float>(spatial) * channels_per_group,
                    epsilon, means, factors);

  const int high_group = min(slice.low_group + 1, groups_per_block - 1);
  const float low_mean = means[slice.low_group], high_mean = means[high_group];
  const float low_factor = factors[slice.low_group], high_factor = factors[high_group];
  Normalizer<T, kVec> normalizer;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const bool is_low = k < slice.low_count;
    normalizer.set(k, is_low ? low_mean : high_mean, gammas[k] * (is_low ? low_factor : high_factor), betas[k]);
  }
  const auto store_output = [&](const Pack& item, int i) {
    float v[kVec];
    item.unpack(v);
    normalizer.apply(v, activation);
    y.store(place(i), v);
  };
  const int batches = (pixels - lds_count + kAhead - 1) / kAhead;  // batches of kAhead items, in reverse
  for (int i = lds_count + (batches - 1) * kAhead; i >= lds_count; i -= kAhead) {
    Pack ahead[kAhead];
    global_items.load_ahead(!kXOnly && sum != nullptr, i, ahead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j < pixels) store_output(ahead[j], i + j);
    }
  }
#pragma unroll 2
  for (int i = 0; i < lds_count; ++i) store_output(items[i * threads + thread], i);
}

namespace {

template <class T, int kVec>
const char* launch_vectors(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  const GroupNormArguments<T> a(p);
  const bool x_only = p.skip == nullptr && a.bias == nullptr && a.sum == nullptr;
  const auto kernel = x_only ? group_norm_cluster_kernel<T, kVec, true> : group_norm_cluster_kernel<T, kVec, false>;
  const dim3 grid(parameters.cluster * p.groups / parameters.groups_per_block, p.batch);
  const size_t lds_bytes = static_cast<size_t>(parameters.block) * parameters.lds_items * kVec * sizeof(T);
  return launch_clusters(kernel, grid, dim3(parameters.block), parameters.cluster, lds_bytes, stream, a.x, a.skip,
                         a.skip_channels, a.bias, p.gamma, p.beta, a.y, a.sum, a.affine_is_float, p.spatial, p.channels,
                         a.channels_per_group, parameters.groups_per_block, parameters.pixels_per_chunk,
                         parameters.cluster, parameters.lds_items, p.activation, p.epsilon);
}

}  // namespace

bool group_norm_has_clusters() { return true; }

// Compute capability 9 guarantees clusters of 8 only.
int group_norm_largest_cluster() {
#if defined(SD_ORT_EMULATED)
  return 4;  // emulated blocks are slow
#else
  static const int largest = [] {
    if (compute_capability() < 9) return 0;
    const auto kernel = reinterpret_cast<const void*>(group_norm_cluster_kernel<half_t, 8, true>);
    return runs_cluster(kernel, kMaxCluster, kMaxClusterThreads, 208 * 1024) ? kMaxCluster : 8;
  }();
  return largest;
#endif
}

const char* group_norm_cluster(const GroupNormParams& p, const GroupNormLaunch& parameters, void* stream) {
  return with_vectors(p.dtype, parameters.vector_bytes, [&](auto access) -> const char* {
    using Access = decltype(access);
    if constexpr (Access::kVec * sizeof(typename Access::type) >= 4) {
      return launch_vectors<typename Access::type, Access::kVec>(p, parameters, stream);
    }
    return "no instance of this size";
  });
}

#else

bool group_norm_has_clusters() { return false; }
int group_norm_largest_cluster() { return 0; }
const char* group_norm_cluster(const GroupNormParams&, const GroupNormLaunch&, void*) {
  return "this build has no clusters";
}

#endif
}  // namespace sd_ort
