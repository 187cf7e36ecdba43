// LinearAdd without a library: one thread per element of Y. Used in float32 if cuBLASLt or hipBLASLt is missing
// or rejects a shape. Reads of W are coalesced; X comes from the cache.
//
// Launch: block (256, 1, 1), grid (ceil(rows * columns / 256), 1, 1), no LDS.
#include "common/gpu.h"
#include "common/math.h"
#include "operators/linear_add/op.h"

namespace sd_ort {

template <class T>
__global__ __launch_bounds__(256) void linear_add_kernel(const T* x, const T* weight, const T* bias, const T* skip,
                                                         T* y, kernel_int64_t count, kernel_int64_t inner,
                                                         kernel_int64_t columns, bool gelu) {
  wait_for_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= count) return;
  const int64_t row = at / columns, column = at % columns;
  float sum = 0.f;
  for (int64_t k = 0; k < inner; ++k) sum += to_float(x[row * inner + k]) * to_float(weight[k * columns + column]);
  if (bias != nullptr) sum += to_float(bias[column]);
  if (skip != nullptr) sum += to_float(skip[at]);
  y[at] = from_float<T>(gelu ? gelu_tanh(sum) : sum);
}

namespace {

template <class T>
const char* launch_type(const LinearAddParams& p, void* stream) {
  const int64_t count = p.rows * p.columns;
  if (count == 0) return nullptr;
  return launch(linear_add_kernel<T>, dim3(ceil_div(count, 256)), dim3(256), 0, stream, static_cast<const T*>(p.x),
                static_cast<const T*>(p.weight), static_cast<const T*>(p.bias), static_cast<const T*>(p.skip),
                static_cast<T*>(p.y), count, p.inner, p.columns, p.gelu != 0);
}

}  // namespace

const char* linear_add_launch(const LinearAddParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, stream); });
}

}  // namespace sd_ort
