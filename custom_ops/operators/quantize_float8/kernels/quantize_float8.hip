// QuantizeFloat8. Bandwidth bound: one access of x per thread.
//
// Launch: block (256, 1, 1), grid (ceil(count / kVec / 256), 1, 1), no LDS.
#include "common/quantized_output.h"
#include "operators/quantize_float8/op.h"

namespace sd_ort {

template <class T, int kVec>
__global__ __launch_bounds__(256) void quantize_float8_kernel(const T* x, QuantizedOutput<T> to,
                                                              kernel_int64_t vectors) {
  wait_for_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= vectors) return;
  float values[kVec];
  Vec<T, kVec>::load(x + at * kVec).unpack(values);
  to.store(at * kVec, values);
}

namespace {

template <class T, int kVec>
const char* quantize_float8_vectors(const QuantizeFloat8Params& p, void* stream) {
  return launch(quantize_float8_kernel<T, kVec>, dim3(ceil_div(p.count / kVec, 256)), dim3(256), 0, stream,
                static_cast<const T*>(p.x), QuantizedOutput<T>(nullptr, p.quantized), p.count / kVec);
}

}  // namespace

const char* quantize_float8_launch(const QuantizeFloat8Params& p, bool vectors, void* stream) {
  if (p.count == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return vectors ? quantize_float8_vectors<T, 16 / sizeof(T)>(p, stream) : quantize_float8_vectors<T, 1>(p, stream);
  });
}

}  // namespace sd_ort
