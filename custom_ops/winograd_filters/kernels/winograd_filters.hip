// WinogradFilters on a GPU. Bandwidth bound: a thread takes the nine taps of neighboring channels of one filter.
//
// Launch: block (256, 1, 1), grid (ceil(vectors / 256), 1, 1), no LDS; vectors = filters * channels / kVec.
#include "common/gpu.h"
#include "winograd_filters/op.h"

namespace sd_ort {

template <class T, int kVec>
__global__ __launch_bounds__(256) void winograd_filters_kernel(const T* weight, T* y, uint32_t vectors,
                                                               uint32_t vectors_per_filter) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t at = static_cast<int64_t>(vector) * kVec, channels = static_cast<int64_t>(vectors_per_filter) * kVec;
  const uint32_t filter = vector / vectors_per_filter;
  const T* taps = weight + at + filter * 8 * channels;  // a filter has nine times its channels
  float rows[4][3][kVec];
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    float column[3][kVec];
#pragma unroll
    for (int i = 0; i < 3; ++i) Vec<T, kVec>::load(taps + (3 * i + j) * channels).unpack(column[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float ends = column[0][k] + column[2][k], middle = column[1][k];
      rows[0][j][k] = column[0][k];
      rows[1][j][k] = 0.5f * (ends + middle);
      rows[2][j][k] = 0.5f * (ends - middle);
      rows[3][j][k] = column[2][k];
    }
  }
  const int64_t length = static_cast<int64_t>(vectors) * kVec;  // of one of the 16
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float made[4][kVec];
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float ends = rows[i][0][k] + rows[i][2][k], middle = rows[i][1][k];
      made[0][k] = rows[i][0][k];
      made[1][k] = 0.5f * (ends + middle);
      made[2][k] = 0.5f * (ends - middle);
      made[3][k] = rows[i][2][k];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) Vec<T, kVec>::pack(made[j]).store(y + (4 * i + j) * length + at);
  }
}

namespace {

template <class T, int kVec>
const char* launch_vectors(const WinogradFiltersParams& p, void* stream) {
  const int64_t vectors = p.filters * p.channels / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > INT32_MAX) return "the weight is too large";
  return launch(winograd_filters_kernel<T, kVec>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                static_cast<const T*>(p.weight), static_cast<T*>(p.y), vectors, p.channels / kVec);
}

}  // namespace

const char* winograd_filters_launch(const WinogradFiltersParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectors = p.channels % 4 == 0 && are_aligned<4 * sizeof(T)>(p.weight, p.y);
    return vectors ? launch_vectors<T, 4>(p, stream) : launch_vectors<T, 1>(p, stream);
  });
}

}  // namespace sd_ort
