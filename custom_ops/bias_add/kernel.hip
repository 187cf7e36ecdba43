// BiasAdd on a GPU. Bandwidth bound: three reads (the bias from cache) and one write, 16 bytes a lane.
//
// Launch: block (kBlock, 1, 1), grid (ceil(rows * channels / kVec / kBlock), 1, 1), no LDS.
#include "bias_add/op.h"
#include "common/gpu.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void bias_add_kernel(const T* x, const T* bias, const T* skip, T* y, int64_t count,
                                                          int channels) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kVec;
  if (at >= count) return;
  const int channel = static_cast<int>(at % channels);
  float sum[kVec], other[kVec];
  Vec<T, kVec>::load(x + at).unpack(sum);
  Vec<T, kVec>::load(bias + channel).unpack(other);
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] += other[i];
  Vec<T, kVec>::load(skip + at).unpack(other);
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] += other[i];
  Vec<T, kVec>::pack(sum).store(y + at);
}

namespace {

template <class T, int kVec, int kBlock>
const char* launch_kernel(const BiasAddParams& p, void* stream) {
  const int64_t count = p.rows * p.channels;
  if (count == 0) return nullptr;
  return launch(bias_add_kernel<T, kVec, kBlock>, dim3(ceil_div(count, kVec * kBlock)), dim3(kBlock), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.bias), static_cast<const T*>(p.skip),
                static_cast<T*>(p.y), count, p.channels);
}

template <class T>
const char* launch_type(const BiasAddParams& p, const BiasAddConfig& config, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (config.vector_bytes == 0) return launch_kernel<T, 1, 256>(p, stream);
  if (config.block == 256) return launch_kernel<T, kWide, 256>(p, stream);
  return launch_kernel<T, kWide, 512>(p, stream);
}

}  // namespace

bool bias_add_supports(const BiasAddParams& p, const BiasAddConfig& config) {
  if (config.vector_bytes == 0) return true;
  return p.channels * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.bias, p.skip, p.y);
}

const char* bias_add_launch(const BiasAddParams& p, const BiasAddConfig& config, void* stream) {
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
