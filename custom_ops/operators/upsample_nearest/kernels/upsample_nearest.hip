// UpsampleNearest on a GPU. Bandwidth bound: a thread reads a vector of one pixel once and writes it scale_height *
// scale_width times; adjacent threads write adjacent channels.
//
// Launch: block (kBlock, 1, 1), grid (ceil(vectors / kBlock), 1, 1), no LDS; vectors = rows * width * channels / kVec,
// those of X.
#include "common/gpu.h"
#include "operators/upsample_nearest/op.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void upsample_nearest_kernel(const T* x, T* y, uint32_t vectors,
                                                                  uint32_t vectors_per_row, uint32_t vectors_per_pixel,
                                                                  uint32_t scale_height, uint32_t scale_width) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * kBlock + threadIdx.x;
  if (vector >= vectors) return;
  const Vec<T, kVec> piece = Vec<T, kVec>::load(x + static_cast<int64_t>(vector) * kVec);
  const uint32_t row = vector / vectors_per_row;
  const uint32_t column = vector - row * vectors_per_row;
  const uint32_t pixels_before = column - column % vectors_per_pixel;  // their vectors
  const int64_t pixel_length = static_cast<int64_t>(vectors_per_pixel) * kVec;
  const int64_t row_length = static_cast<int64_t>(vectors_per_row) * scale_width * kVec;  // of Y
  T* to =
      y + row_length * scale_height * row + (static_cast<int64_t>(pixels_before) * (scale_width - 1) + column) * kVec;
  for (uint32_t i = 0; i < scale_height; ++i, to += row_length) {
    for (uint32_t j = 0; j < scale_width; ++j) piece.store(to + j * pixel_length);
  }
}

namespace {

template <class T, int kVec, int kBlock>
const char* launch_kernel(const UpsampleNearestParams& p, void* stream) {
  const int64_t vectors = p.rows * p.width * p.channels / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > UINT32_MAX) return "the tensor has more than 2^32 vectors";
  return launch(upsample_nearest_kernel<T, kVec, kBlock>, dim3(ceil_div(vectors, kBlock)), dim3(kBlock), 0, stream,
                static_cast<const T*>(p.x), static_cast<T*>(p.y), vectors, p.width * p.channels / kVec,
                p.channels / kVec, p.scale_height, p.scale_width);
}

}  // namespace

const char* upsample_nearest_launch(const UpsampleNearestParams& p, const UpsampleNearestConfig& config, void* stream) {
  return with_vectors(p.dtype, config.vector_bytes, [&](auto access) {
    using T = typename decltype(access)::type;
    constexpr int kVec = decltype(access)::kVec;
    if constexpr (kVec * sizeof(T) == 16) {
      if (config.block == 128) return launch_kernel<T, kVec, 128>(p, stream);
      if (config.block == 512) return launch_kernel<T, kVec, 512>(p, stream);
    }
    return launch_kernel<T, kVec, 256>(p, stream);
  });
}

}  // namespace sd_ort
