// Elements of QKV in float16, for kernels without float8. Bandwidth bound: kVec elements per thread.
//
// Launch: block (256, 1, 1), grid (ceil(count / kVec / 256), 1, 1), no LDS.
#include "common/float8.h"
#include "common/gpu.h"
#include "operators/quantized_attention/op.h"

namespace sd_ort {

template <int kVec>
__global__ __launch_bounds__(256) void dequantize_qkv_kernel(const uint8_t* from, half_t* to, kernel_int64_t vectors) {
  wait_for_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= vectors) return;
  uint8_t bits[kVec];
  memcpy(bits, from + at * kVec, kVec);
  float values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = float8_to_float(bits[i]);
  Vec<half_t, kVec>::pack(values).store(to + at * kVec);
}

namespace {

template <int kVec>
const char* dequantize_vectors(const QuantizedAttentionParams& p, void* to, void* stream) {
  const int64_t vectors = p.qkv_count() / kVec;
  return launch(dequantize_qkv_kernel<kVec>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                static_cast<const uint8_t*>(p.qkv), static_cast<half_t*>(to), vectors);
}

}  // namespace

const char* dequantize_qkv_launch(const QuantizedAttentionParams& p, void* to, void* stream) {
  if (p.qkv_count() == 0) return nullptr;
  const bool vectors = p.qkv_count() % 8 == 0 && are_aligned<8>(p.qkv) && are_aligned<16>(to);
  return vectors ? dequantize_vectors<8>(p, to, stream) : dequantize_vectors<1>(p, to, stream);
}

}  // namespace sd_ort
