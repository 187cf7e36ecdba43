// BiasAdd on a GPU. Bandwidth bound: two reads (and the bias from cache) and one write, 16 bytes per lane.
//
// Launch: block (kBlock, 1, 1), grid (ceil(vectors / kBlock), 1, 1), no LDS; vectors = rows * channels / kVec.
#include "common/gpu.h"
#include "operators/bias_add/op.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void bias_add_kernel(const T* x, const T* bias, const T* skip, T* y,
                                                          uint32_t vectors, uint32_t vectors_per_row) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * kBlock + threadIdx.x;
  if (vector >= vectors) return;
  const int64_t at = static_cast<int64_t>(vector) * kVec;
  float sum[kVec], shift[kVec], other[kVec] = {};
  Vec<T, kVec>::load(x + at).unpack(sum);
  if (skip != nullptr) Vec<T, kVec>::load(skip + at).unpack(other);
  Vec<T, kVec>::load(bias + vector % vectors_per_row * kVec).unpack(shift);
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] += shift[i] + other[i];
  Vec<T, kVec>::pack(sum).store(y + at);
}

namespace {

template <class T, int kVec, int kBlock>
const char* launch_kernel(const BiasAddParams& p, void* stream) {
  const int64_t vectors = p.rows * p.channels / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > UINT32_MAX) return "the tensor has more than 2^32 vectors";
  return launch(bias_add_kernel<T, kVec, kBlock>, dim3(ceil_div(vectors, kBlock)), dim3(kBlock), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.bias), static_cast<const T*>(p.skip),
                static_cast<T*>(p.y), vectors, p.channels / kVec);
}

template <class T>
const char* launch_type(const BiasAddParams& p, const BiasAddConfig& config, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (!config.vectors) return launch_kernel<T, 1, 256>(p, stream);
  if (config.block == 256) return launch_kernel<T, kWide, 256>(p, stream);
  if (config.block == 512) return launch_kernel<T, kWide, 512>(p, stream);
  return launch_kernel<T, kWide, 128>(p, stream);
}

}  // namespace

const char* bias_add_launch(const BiasAddParams& p, const BiasAddConfig& config, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, config, stream); });
}

}  // namespace sd_ort
