// NhwcConv on a GPU without a library: one thread per element of Y, which loads kVec channels at once. The reference of
// the other candidates.
//
// nhwc_conv_kernel<T, kVec>
//   Launch: block (256, 1, 1), grid (ceil(elements / 256), 1, 1), no LDS.
#include "common/gpu.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {

template <class T, int kVec>
__global__ __launch_bounds__(256) void nhwc_conv_kernel(const T* x, const T* filters, const T* bias, const T* skip,
                                                        T* y, uint32_t elements, NhwcConvShape p) {
  wait_for_predecessor();
  const uint32_t element = blockIdx.x * 256 + threadIdx.x;
  if (element >= elements) return;
  const int channels = p.channels / p.groups;
  const int filter = static_cast<int>(element % static_cast<uint32_t>(p.filter_count));
  uint32_t pixel = element / static_cast<uint32_t>(p.filter_count);
  const int column = static_cast<int>(pixel % static_cast<uint32_t>(p.out_width));
  pixel /= static_cast<uint32_t>(p.out_width);
  const int row = static_cast<int>(pixel % static_cast<uint32_t>(p.out_height));
  const int64_t image = pixel / static_cast<uint32_t>(p.out_height);
  const int group = filter / (p.filter_count / p.groups);
  const T* window = filters + static_cast<int64_t>(filter) * p.kernel_height * p.kernel_width * channels;
  float sum = bias == nullptr ? 0.f : to_float(bias[filter]);
  for (int kh = 0; kh < p.kernel_height; ++kh) {
    const int from_row = row * p.stride_height - p.pad_top + kh * p.dilation_height;
    for (int kw = 0; kw < p.kernel_width; ++kw, window += channels) {
      const int from_column = column * p.stride_width - p.pad_left + kw * p.dilation_width;
      if (from_row < 0 || from_row >= p.height || from_column < 0 || from_column >= p.width) continue;
      const T* from = x + ((image * p.height + from_row) * p.width + from_column) * p.channels + group * channels;
      for (int c = 0; c < channels; c += kVec) {
        sum = add_products<kVec>(sum, from + c, window + c, [](T element) { return to_float(element); });
      }
    }
  }
  if (skip != nullptr) sum += to_float(skip[element]);
  if (p.activation == NhwcConvActivation::kRelu && sum < 0.f) sum = 0.f;  // keeps NaN
  y[element] = from_float<T>(sum);
}

namespace {

template <class T>
const char* launch_type(const NhwcConvParams& p, void* stream) {
  const int64_t elements = p.elements();
  if (elements == 0) return nullptr;
  if (elements > INT32_MAX) return "the image has more than 2^31 elements";
  constexpr int kVec = 16 / sizeof(T);
  const bool vectors = p.channels / p.groups % kVec == 0 && are_aligned<16>(p.x, p.filters);
  return launch(vectors ? nhwc_conv_kernel<T, kVec> : nhwc_conv_kernel<T, 1>, dim3(ceil_div(elements, 256)), dim3(256),
                0, stream, static_cast<const T*>(p.x), static_cast<const T*>(p.filters), static_cast<const T*>(p.bias),
                static_cast<const T*>(p.skip), static_cast<T*>(p.y), elements, nhwc_conv_shape(p));
}

}  // namespace

const char* nhwc_conv_launch(const NhwcConvParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, stream); });
}

}  // namespace sd_ort
