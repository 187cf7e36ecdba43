// WinogradFilters on a GPU. Bandwidth bound: a thread handles the nine taps of adjacent channels of one filter. It
// writes kSide^2 matrices: kSide is 4, or 3 for upsampled images.
//
// Launch: block (256, 1, 1), grid (ceil(vectors / 256), 1, 1), no LDS; vectors = filters * channels / kVec.
#include "operators/nhwc_winograd/kernels/vectors.h"
#include "operators/winograd_filters/op.h"

namespace sd_ort {

template <class T, int kVec, int kSide>
__global__ __launch_bounds__(256) void winograd_filters_kernel(const T* weight, T* y, uint32_t vectors,
                                                               uint32_t vectors_per_filter) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t at = static_cast<int64_t>(vector) * kVec, channels = static_cast<int64_t>(vectors_per_filter) * kVec;
  const uint32_t filter = vector / vectors_per_filter;
  const T* taps = weight + at + filter * 8 * channels;  // a filter has 9 * channels elements
  float rows[4][3][kVec];
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    float column[3][kVec];
#pragma unroll
    for (int i = 0; i < 3; ++i) unpack_words(Vec<T, kVec>::load(taps + (3 * i + j) * channels), column[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float ends = column[0][k] + column[2][k], middle = column[1][k];
      rows[0][j][k] = column[0][k];
      rows[1][j][k] = 0.5f * (ends + middle);
      rows[2][j][k] = 0.5f * (ends - middle);
      rows[3][j][k] = column[2][k];
    }
  }
  const int64_t length = static_cast<int64_t>(vectors) * kVec;  // elements of a matrix
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const auto& row = rows[kSide == 3 && i == 2 ? 3 : i];
    float transformed[4][kVec];
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float ends = row[0][k] + row[2][k], middle = row[1][k];
      transformed[0][k] = row[0][k];
      transformed[1][k] = 0.5f * (ends + middle);
      transformed[2][k] = 0.5f * (ends - middle);
      transformed[3][k] = row[2][k];
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      Vec<T, kVec>::pack(transformed[kSide == 3 && j == 2 ? 3 : j]).store(y + (kSide * i + j) * length + at);
    }
  }
}

namespace {

template <class T, int kVec, int kSide>
const char* launch_kernel(const WinogradFiltersParams& p, void* stream) {
  const int64_t vectors = p.filters * p.channels / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > INT32_MAX) return "the weight is too large";
  return launch(winograd_filters_kernel<T, kVec, kSide>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                static_cast<const T*>(p.weight), static_cast<T*>(p.y), vectors, p.channels / kVec);
}

}  // namespace

const char* winograd_filters_launch(const WinogradFiltersParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = kWinogradVec<T>;
    const bool wide = p.channels % kVec == 0 && are_aligned<16>(p.weight, p.y);
    if (p.upsampled != 0) return wide ? launch_kernel<T, kVec, 3>(p, stream) : launch_kernel<T, 1, 3>(p, stream);
    return wide ? launch_kernel<T, kVec, 4>(p, stream) : launch_kernel<T, 1, 4>(p, stream);
  });
}

}  // namespace sd_ort
