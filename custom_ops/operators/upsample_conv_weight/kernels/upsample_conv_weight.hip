// UpsampleConvWeight on a GPU. Bandwidth bound: a block transposes all nine taps of 32 filters and 32 channels in LDS,
// so that reads and writes are contiguous.
//
// Launch: block (256, 1, 1), grid (ceil(channels / 32), ceil(filters / 32), 1), static LDS only.
#include "common/gpu.h"
#include "operators/upsample_conv_weight/op.h"

namespace sd_ort {

constexpr int kWeightTile = 32, kWeightThreads = 256, kWeightRows = kWeightThreads / kWeightTile;

template <class T>
__global__ __launch_bounds__(kWeightThreads) void upsample_conv_weight_kernel(const T* weight, T* y, uint32_t filters,
                                                                              uint32_t channels) {
  wait_for_predecessor();
  // rows of an odd number of 4-byte words: lanes that read a column use different banks
  __shared__ T taps[9][kWeightTile][kWeightTile + 4 / sizeof(T)];
  const uint32_t first_filter = blockIdx.y * kWeightTile, first_channel = blockIdx.x * kWeightTile;
  const uint32_t lane = threadIdx.x % kWeightTile, line = threadIdx.x / kWeightTile;
  for (uint32_t row = line; row < kWeightTile; row += kWeightRows) {
    if (first_filter + row >= filters || first_channel + lane >= channels) continue;
    const int64_t from = static_cast<int64_t>(first_filter + row) * 9 * channels + first_channel + lane;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) taps[tap][row][lane] = weight[from + static_cast<int64_t>(tap) * channels];
  }
  block_barrier();
  for (uint32_t row = line; row < kWeightTile; row += kWeightRows) {
    if (first_channel + row >= channels || first_filter + lane >= filters) continue;
    float sums[3][4];  // sums of adjacent taps of a row: the last two, the middle two, ...
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float left = to_float(taps[3 * i][lane][row]), middle = to_float(taps[3 * i + 1][lane][row]),
                  right = to_float(taps[3 * i + 2][lane][row]);
      sums[i][0] = right;
      sums[i][1] = middle + right;
      sums[i][2] = left + middle;
      sums[i][3] = left;
    }
    T* const to = y + static_cast<int64_t>(first_channel + row) * 16 * filters + first_filter + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float column[4] = {sums[2][j], sums[1][j] + sums[2][j], sums[0][j] + sums[1][j], sums[0][j]};
#pragma unroll
      for (int i = 0; i < 4; ++i) to[static_cast<int64_t>(4 * i + j) * filters] = from_float<T>(column[i]);
    }
  }
}

const char* upsample_conv_weight_launch(const UpsampleConvWeightParams& p, void* stream) {
  if (p.filters == 0 || p.channels == 0) return nullptr;
  if (p.filters > UINT16_MAX * kWeightTile || p.channels > UINT32_MAX) return "the weight is too large";
  const dim3 grid(ceil_div(p.channels, kWeightTile), ceil_div(p.filters, kWeightTile));
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch(upsample_conv_weight_kernel<T>, grid, dim3(kWeightThreads), 0, stream,
                  static_cast<const T*>(p.weight), static_cast<T*>(p.y), p.filters, p.channels);
  });
}

}  // namespace sd_ort
