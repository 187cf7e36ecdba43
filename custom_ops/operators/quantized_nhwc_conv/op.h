// QuantizedNhwcConv(X, W, scale, B, skip?) -> Y: a 3 x 3 convolution of float8 (e4m3fn) elements, channels last, with
// pads 1, stride 1, dilation 1 and one group. Y = conv(X, W) * scale + B + skip, with sums in float32. X is (N, H, W,
// C), W (M, 3, 3, C); scale float32, one number or (M): the scale of X times that of W; B (M), skip and Y (N, H, W, M).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct QuantizedNhwcConvParams {
  DType dtype;          // of bias, skip and y
  const void* x;        // (batch, height, width, channels)
  const void* filters;  // (filter_count, 3, 3, channels)
  const float* scale;   // (scales)
  const void* bias;     // (filter_count)
  const void* skip;     // as y, or null
  void* y;              // (batch, height, width, filter_count)
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t channels;
  int64_t filter_count;
  int32_t scales;  // 1 for all filters, else 0: one a filter

  int64_t pixels() const { return batch * height * width; }
  int64_t inner() const { return 9 * channels; }  // products of a sum
  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels, filter_count}) text += "_" + std::to_string(size);
    return text + (scales == 1 ? "" : "_channels") + (skip == nullptr ? "" : "_skip");
  }
  std::vector<Output> outputs() const {
    const double nmse = dtype == DType::kFloat32 ? 0 : kFloat8SumNmse * static_cast<double>(inner());
    return {{y, static_cast<size_t>(pixels() * filter_count), dtype, nmse}};
  }
};

// Generic kernel: one thread per element, any shape, slow.
const char* quantized_nhwc_conv_launch(const QuantizedNhwcConvParams& params, void* stream);

// Writes X as (batch, height, width, channels) and W as (filter_count, 3, 3, channels) in `dtype`, float16 or bfloat16,
// so that their convolution needs no scale.
const char* quantized_nhwc_conv_dequantize(const QuantizedNhwcConvParams& params, void* x, void* filters, void* stream);

// By warpgroup instructions, with tiles of `columns` filters.
bool quantized_nhwc_conv_supports_warpgroups(const QuantizedNhwcConvParams& params, int columns);
const char* quantized_nhwc_conv_warpgroups(const QuantizedNhwcConvParams& params, int columns, void* stream);

// The same by blocks that share a tile: sums times the scale, (splits, batch, height, width, filter_count).
int64_t quantized_nhwc_conv_splits(const QuantizedNhwcConvParams& params, int columns);  // 1 if tiles fill the device
const char* quantized_nhwc_conv_split_warpgroups(const QuantizedNhwcConvParams& params, int columns, int64_t splits,
                                                 float* sums, void* stream);

}  // namespace sd_ort
