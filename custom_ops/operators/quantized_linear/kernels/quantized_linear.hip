// QuantizedLinear without matrix instructions: one thread per element of Y. Used if no library takes the call.
//
// Launch: block (256, 1, 1), grid (ceil(rows * columns of Y / 256), 1, 1), no LDS.
#include "common/float8.h"
#include "common/gpu.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {

struct QuantizedLinearShape {
  int64_t count, inner, columns, width;  // of Y; K, N, and the columns of Y
  bool is_int8, one_scale, gelu, gated;
};

__device__ inline float quantized_linear_sum(const uint8_t* x, const uint8_t* weight, int64_t inner, bool is_int8) {
  if (is_int8) {
    int sum = 0;
    for (int64_t k = 0; k < inner; ++k) sum += static_cast<int8_t>(x[k]) * static_cast<int8_t>(weight[k]);
    return static_cast<float>(sum);
  }
  float sum = 0.f;
  for (int64_t k = 0; k < inner; ++k) sum += float8_to_float(x[k]) * float8_to_float(weight[k]);
  return sum;
}

template <class T>
__global__ __launch_bounds__(256) void quantized_linear_kernel(const uint8_t* x, const uint8_t* weight,
                                                               const float* scale, const T* bias, const T* skip,
                                                               QuantizedOutput<T> y, QuantizedLinearShape shape) {
  wait_for_predecessor();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= shape.count) return;
  const int64_t row = at / shape.width, column = at % shape.width;
  float values[2] = {0.f, 0.f};
  for (int part = 0; part < (shape.gated ? 2 : 1); ++part) {
    const int64_t n = column + part * shape.width;
    const float sum = quantized_linear_sum(x + row * shape.inner, weight + n * shape.inner, shape.inner, shape.is_int8);
    values[part] = sum * scale[shape.one_scale ? 0 : n] + to_float(bias[n]);
  }
  if (skip != nullptr) values[0] += to_float(skip[at]);
  if (shape.gelu) values[0] = gelu_tanh(values[0]);
  if (shape.gated) values[0] *= gelu(values[1]);
  y.store(at, values[0]);
}

namespace {

template <class T>
const char* launch_type(const QuantizedLinearParams& p, void* stream) {
  const QuantizedLinearShape shape = {p.rows * p.y_columns(),       p.inner,       p.columns,   p.y_columns(),
                                      p.eight_bits == DType::kInt8, p.scales == 1, p.gelu != 0, p.gated != 0};
  if (shape.count == 0) return nullptr;
  return launch(quantized_linear_kernel<T>, dim3(ceil_div(shape.count, 256)), dim3(256), 0, stream,
                static_cast<const uint8_t*>(p.x), static_cast<const uint8_t*>(p.weight), p.scale,
                static_cast<const T*>(p.bias), static_cast<const T*>(p.skip), QuantizedOutput<T>(p.y, p.quantized),
                shape);
}

}  // namespace

const char* quantized_linear_launch(const QuantizedLinearParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, stream); });
}

Float8Units quantized_linear_units() {
#if defined(SD_ORT_EMULATED)
  return kHip ? Float8Units::kFnuz : Float8Units::kOcp;
#else
  int device = 0;
  gpuDeviceProp_t properties;
  if (SD_ORT_GPU_NAME(GetDevice)(&device) != gpuSuccess) return Float8Units::kNone;
  if (SD_ORT_GPU_NAME(GetDeviceProperties)(&properties, device) != gpuSuccess) return Float8Units::kNone;
  const std::string arch = arch_name(properties);
  const auto begins = [&](const char* name) { return arch.rfind(name, 0) == 0; };
  if (begins("gfx94")) return Float8Units::kFnuz;
  if (begins("gfx950") || begins("gfx12")) return Float8Units::kOcp;
  return begins("sm_") && std::stoi(arch.substr(3)) >= 89 ? Float8Units::kOcp : Float8Units::kNone;
#endif
}

}  // namespace sd_ort
