// SwiGlu on a GPU. Bandwidth bound: reads gate and up once and writes Y, 16 bytes per lane. Processes them from the
// end, which the preceding GEMM wrote last and which is still cached.
//
// Launch: block (kBlock, 1, 1), grid (ceil(vectors / kBlock), 1, 1), no LDS; vectors = rows * columns / kVec.
#include "common/gpu.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "operators/swiglu/op.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void swiglu_kernel(const T* gate, const T* up, QuantizedOutput<T> y,
                                                        uint32_t vectors, uint32_t vectors_per_row,
                                                        kernel_int64_t stride) {
  wait_for_predecessor();
  const uint32_t index = blockIdx.x * kBlock + threadIdx.x;
  if (index >= vectors) return;
  const uint32_t vector = vectors - 1 - index;
  const uint32_t row = vector / vectors_per_row;
  const int64_t from = row * stride + static_cast<int64_t>(vector - row * vectors_per_row) * kVec;
  float left[kVec], right[kVec];
  Vec<T, kVec>::load(gate + from).unpack(left);
  Vec<T, kVec>::load(up + from).unpack(right);
#pragma unroll
  for (int i = 0; i < kVec; ++i) left[i] = silu(left[i]) * right[i];
  y.store(static_cast<int64_t>(vector) * kVec, left);
}

namespace {

template <class T, int kVec, int kBlock>
const char* launch_kernel(const SwiGluParams& p, void* stream) {
  const int64_t vectors = p.rows * p.columns / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > UINT32_MAX) return "the tensor has more than 2^32 vectors";
  return launch(swiglu_kernel<T, kVec, kBlock>, dim3(ceil_div(vectors, kBlock)), dim3(kBlock), 0, stream,
                static_cast<const T*>(p.gate), static_cast<const T*>(p.up), QuantizedOutput<T>(p.y, p.quantized),
                vectors, p.columns / kVec, p.stride);
}

template <class T>
const char* launch_type(const SwiGluParams& p, const SwiGluConfig& config, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (!config.vectors) return launch_kernel<T, 1, 256>(p, stream);
  if (config.block == 256) return launch_kernel<T, kWide, 256>(p, stream);
  if (config.block == 512) return launch_kernel<T, kWide, 512>(p, stream);
  return launch_kernel<T, kWide, 128>(p, stream);
}

}  // namespace

const char* swiglu_launch(const SwiGluParams& p, const SwiGluConfig& config, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, config, stream); });
}

}  // namespace sd_ort
