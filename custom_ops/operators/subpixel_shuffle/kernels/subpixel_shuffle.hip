// SubpixelShuffle on a GPU. Bandwidth bound: a thread reads a vector of one phase of a pixel, adds the cached bias and
// writes it; adjacent threads write adjacent channels.
//
// Launch: block (256, 1, 1), grid (ceil(vectors / 256), 1, 1), no LDS; vectors = batch * height * width * channels /
// kVec, those of Y.
#include "common/gpu.h"
#include "operators/subpixel_shuffle/op.h"

namespace sd_ort {

template <class T, int kVec>
__global__ __launch_bounds__(256) void subpixel_shuffle_kernel(const T* x, const T* bias, T* y, uint32_t vectors,
                                                               uint32_t height, uint32_t width,
                                                               uint32_t vectors_per_pixel) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const uint32_t pixel = vector / vectors_per_pixel, piece = vector - pixel * vectors_per_pixel;
  const uint32_t line = pixel / width, column = pixel - line * width;
  const uint32_t sample = line / height, row = line - sample * height;
  const int64_t from_line = static_cast<int64_t>(sample) * (height / 2 + 1) + (row + 1) / 2;
  const int64_t from_pixel = from_line * (width / 2 + 1) + (column + 1) / 2;
  const int64_t from = (from_pixel * 4 + row % 2 * 2 + column % 2) * vectors_per_pixel + piece;
  auto moved = Vec<T, kVec>::load(x + from * kVec);
  if (bias != nullptr) {
    float sum[kVec], shift[kVec];
    moved.unpack(sum);
    Vec<T, kVec>::load(bias + static_cast<int64_t>(piece) * kVec).unpack(shift);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += shift[i];
    moved = Vec<T, kVec>::pack(sum);
  }
  moved.store(y + static_cast<int64_t>(vector) * kVec);
}

namespace {

template <class T, int kVec>
const char* launch_kernel(const SubpixelShuffleParams& p, void* stream) {
  if (p.is_empty()) return nullptr;
  const int64_t vectors = p.batch * p.height * 2 * p.width * 2 * p.channels / kVec;
  if (vectors > UINT32_MAX) return "the tensor has more than 2^32 vectors";
  return launch(subpixel_shuffle_kernel<T, kVec>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.bias), static_cast<T*>(p.y), vectors, p.height * 2,
                p.width * 2, p.channels / kVec);
}

}  // namespace

const char* subpixel_shuffle_launch(const SubpixelShuffleParams& p, int vector_bytes, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return vector_bytes == 16 ? launch_kernel<T, 16 / sizeof(T)>(p, stream) : launch_kernel<T, 1>(p, stream);
  });
}

}  // namespace sd_ort
