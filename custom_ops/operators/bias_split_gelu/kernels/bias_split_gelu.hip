// BiasSplitGelu on a GPU. Bandwidth bound: reads X once, writes half as much, 16 bytes per lane. Processes X from its
// end, which the preceding GEMM wrote last and which is still cached.
//
// Launch: block (kBlock, 1, 1), grid (ceil(vectors / kBlock), 1, 1), no LDS; vectors = rows * half / kVec, those of Y.
#include "common/gpu.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "operators/bias_split_gelu/op.h"

namespace sd_ort {

template <class T, int kVec, int kBlock>
__global__ __launch_bounds__(kBlock) void bias_split_gelu_kernel(const T* x, const T* bias, QuantizedOutput<T> y,
                                                                 uint32_t vectors, uint32_t vectors_per_row) {
  wait_for_predecessor();
  const uint32_t index = blockIdx.x * kBlock + threadIdx.x;
  if (index >= vectors) return;
  const uint32_t vector = vectors - 1 - index;
  const uint32_t row = vector / vectors_per_row;
  const uint32_t column = vector - row * vectors_per_row;
  const int64_t half = static_cast<int64_t>(vectors_per_row) * kVec;
  const T* from = x + 2 * half * row + column * kVec;
  float left[kVec], right[kVec], shift[kVec];
  const Vec<T, kVec> left_raw = Vec<T, kVec>::load(from);
  const Vec<T, kVec> right_raw = Vec<T, kVec>::load(from + half);
  left_raw.unpack(left);
  Vec<T, kVec>::load(bias + column * kVec).unpack(shift);
#pragma unroll
  for (int i = 0; i < kVec; ++i) left[i] += shift[i];
  right_raw.unpack(right);
  Vec<T, kVec>::load(bias + half + column * kVec).unpack(shift);
#pragma unroll
  for (int i = 0; i < kVec; ++i) left[i] *= gelu(right[i] + shift[i]);
  y.store(static_cast<int64_t>(vector) * kVec, left);
}

namespace {

template <class T, int kVec, int kBlock>
const char* launch_kernel(const BiasSplitGeluParams& p, void* stream) {
  const int64_t vectors = p.rows * p.half / kVec;
  if (vectors == 0) return nullptr;
  if (vectors > UINT32_MAX) return "the tensor has more than 2^32 vectors";
  return launch(bias_split_gelu_kernel<T, kVec, kBlock>, dim3(ceil_div(vectors, kBlock)), dim3(kBlock), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.bias), QuantizedOutput<T>(p.y, p.quantized),
                vectors, p.half / kVec);
}

template <class T>
const char* launch_type(const BiasSplitGeluParams& p, const BiasSplitGeluConfig& config, void* stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (!config.vectors) return launch_kernel<T, 1, 256>(p, stream);
  if (config.block == 256) return launch_kernel<T, kWide, 256>(p, stream);
  if (config.block == 512) return launch_kernel<T, kWide, 512>(p, stream);
  return launch_kernel<T, kWide, 128>(p, stream);
}

}  // namespace

const char* bias_split_gelu_launch(const BiasSplitGeluParams& p, const BiasSplitGeluConfig& config, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, config, stream); });
}

}  // namespace sd_ort
