// QuantizedNhwcConv on any GPU: one thread per element of Y, which loads kVec channels at once, the reference of the
// other candidates; and the conversion of X and W to 16 bits for NhwcConv's tile kernel.
//
// quantized_nhwc_conv_generic_kernel<T, kVec>, dequantize_rows_kernel<T>
//   Launch: block (256, 1, 1), grid (ceil(elements / 256), 1, 1), no LDS.
#include "common/float8.h"
#include "common/gpu.h"
#include "operators/quantized_nhwc_conv/op.h"

namespace sd_ort {
namespace {

struct QuantizedNhwcConvSizes {
  int32_t height, width, channels, filter_count, scales;
};

}  // namespace

template <class T, int kVec>
__global__ __launch_bounds__(256) void quantized_nhwc_conv_generic_kernel(const uint8_t* x, const uint8_t* filters,
                                                                          const float* scale, const T* bias,
                                                                          const T* skip, T* y, uint32_t elements,
                                                                          QuantizedNhwcConvSizes p) {
  wait_for_predecessor();
  const uint32_t element = blockIdx.x * 256 + threadIdx.x;
  if (element >= elements) return;
  const int filter = static_cast<int>(element % static_cast<uint32_t>(p.filter_count));
  uint32_t pixel = element / static_cast<uint32_t>(p.filter_count);
  const int column = static_cast<int>(pixel % static_cast<uint32_t>(p.width));
  pixel /= static_cast<uint32_t>(p.width);
  const int line = static_cast<int>(pixel % static_cast<uint32_t>(p.height));
  const int64_t image = pixel / static_cast<uint32_t>(p.height);
  const uint8_t* window = filters + static_cast<int64_t>(filter) * 9 * p.channels;
  float sum = 0.f;
  for (int tap = 0; tap < 9; ++tap, window += p.channels) {
    const int from_line = line + tap / 3 - 1, from_column = column + tap % 3 - 1;
    if (from_line < 0 || from_line >= p.height || from_column < 0 || from_column >= p.width) continue;
    const uint8_t* from = x + ((image * p.height + from_line) * p.width + from_column) * p.channels;
    for (int c = 0; c < p.channels; c += kVec) {
      sum = add_products<kVec>(sum, from + c, window + c, [](uint8_t bits) { return float8_to_float(bits); });
    }
  }
  sum = sum * scale[p.scales == 1 ? 0 : filter] + to_float(bias[filter]);
  if (skip != nullptr) sum += to_float(skip[element]);
  y[element] = from_float<T>(sum);
}

// Y of a row is `from` times factor, and scale[row] or scale[0] if there is a scale.
template <class T>
__global__ __launch_bounds__(256) void dequantize_rows_kernel(const uint8_t* from, T* y, const float* scale,
                                                              int32_t scale_step, float factor, uint32_t row_elements,
                                                              uint32_t elements) {
  wait_for_predecessor();
  const uint32_t element = blockIdx.x * 256 + threadIdx.x;
  if (element >= elements) return;
  if (scale != nullptr) factor *= scale[element / row_elements * scale_step];
  y[element] = from_float<T>(float8_to_float(from[element]) * factor);
}

namespace {

template <class T>
const char* launch_quantized_nhwc_conv(const QuantizedNhwcConvParams& p, void* stream) {
  const int64_t elements = p.pixels() * p.filter_count;
  if (elements == 0) return nullptr;
  if (elements > INT32_MAX) return "the image has more than 2^31 elements";
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  constexpr int kVec = 8;
  const bool vectors = p.channels % kVec == 0 && are_aligned<kVec>(p.x, p.filters);
  return launch(
      vectors ? quantized_nhwc_conv_generic_kernel<T, kVec> : quantized_nhwc_conv_generic_kernel<T, 1>,
      dim3(ceil_div(elements, 256)), dim3(256), 0, stream, static_cast<const uint8_t*>(p.x),
      static_cast<const uint8_t*>(p.filters), p.scale, static_cast<const T*>(p.bias), static_cast<const T*>(p.skip),
      static_cast<T*>(p.y), elements,
      QuantizedNhwcConvSizes{narrow(p.height), narrow(p.width), narrow(p.channels), narrow(p.filter_count), p.scales});
}

template <class T>
const char* dequantize_rows(const void* from, void* y, const float* scale, int32_t scale_step, float factor,
                            int64_t rows, int64_t row_elements, void* stream) {
  const int64_t elements = rows * row_elements;
  return launch(dequantize_rows_kernel<T>, dim3(ceil_div(elements, 256)), dim3(256), 0, stream,
                static_cast<const uint8_t*>(from), static_cast<T*>(y), scale, scale_step, factor, row_elements,
                elements);
}

template <class T>
const char* dequantize(const QuantizedNhwcConvParams& p, void* x, void* filters, void* stream) {
  // A power of two keeps X exact, and both within float16: elements are at most 448.
  constexpr float kXFactor = 1.f / 16;
  const char* const error = dequantize_rows<T>(p.x, x, nullptr, 0, kXFactor, p.pixels(), p.channels, stream);
  if (error != nullptr) return error;
  return dequantize_rows<T>(p.filters, filters, p.scale, p.scales == 1 ? 0 : 1, 1.f / kXFactor, p.filter_count,
                            p.inner(), stream);
}

}  // namespace

const char* quantized_nhwc_conv_launch(const QuantizedNhwcConvParams& p, void* stream) {
  return with_type(p.dtype,
                   [&](auto type) { return launch_quantized_nhwc_conv<typename decltype(type)::type>(p, stream); });
}

const char* quantized_nhwc_conv_dequantize(const QuantizedNhwcConvParams& p, void* x, void* filters, void* stream) {
  return p.dtype == DType::kFloat16 ? dequantize<half_t>(p, x, filters, stream)
                                    : dequantize<bf16_t>(p, x, filters, stream);
}

}  // namespace sd_ort
