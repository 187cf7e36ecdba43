// UpsampleNearest on a GPU. Bandwidth bound: a thread reads a vector of one pixel once and writes it scale_height *
// scale_width times; neighbouring threads write neighbouring channels.
//
// Launch: block (kBlock, 1, 1), grid (ceil(vectors / kBlock), 1, 1), no LDS; vectors = rows * width * channels / kVec,
// those of X.
#include "common/gpu.h"
#include "upsample_nearest/op.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void upsample_nearest_kernel(const T* x, T* y, uint32_t vectors,
                                                                  uint32_t vectors_per_row, uint32_t vectors_per_pixel,
                                                                  uint32_t scale_height, uint32_t scale_width) {
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

template <int kBytes>
bool takes_vectors(const UpsampleNearestParams& p) {
  return p.channels * size_of(p.dtype) % kBytes == 0 && are_aligned<kBytes>(p.x, p.y);
}

// With the widest vectors that the call takes, kVec elements at most.
template <class T, int kVec>
const char* launch_widest(const UpsampleNearestParams& p, void* stream) {
  if constexpr (kVec > 1) {
    if (!takes_vectors<kVec * sizeof(T)>(p)) return launch_widest<T, kVec / 2>(p, stream);
  }
  return launch_kernel<T, kVec, 256>(p, stream);
}

template <class T>
const char* launch_type(const UpsampleNearestParams& p, const UpsampleNearestConfig& config, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (config.block == 256) return launch_widest<T, kWide>(p, stream);
  if (config.block == 512) return launch_kernel<T, kWide, 512>(p, stream);
  return launch_kernel<T, kWide, 128>(p, stream);
}

}  // namespace

bool upsample_nearest_supports(const UpsampleNearestParams& p, const UpsampleNearestConfig& config) {
  return config.block == 256 || takes_vectors<16>(p);
}

const char* upsample_nearest_launch(const UpsampleNearestParams& p, const UpsampleNearestConfig& config, void* stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_type<float>(p, config, stream);
    case DType::kFloat16:
      return launch_type<half_t>(p, config, stream);
    default:
      return launch_type<bf16_t>(p, config, stream);
  }
}

}  // namespace sd_ort
