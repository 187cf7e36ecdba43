// NhwcConv(X, W, B?, skip?) -> Y: ai.onnx::Conv over channels-last tensors, and skip added. X is (N, H, W, C), W
// (M, kH, kW, C / group), B (M), skip and Y (N, oH, oW, M). As com.microsoft::NhwcConv, but for skip.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct NhwcConvParams {
  DType dtype;
  const void* x;        // (batch, height, width, channels)
  const void* filters;  // (filter_count, kernel_height, kernel_width, channels / groups)
  const void* bias;     // (filter_count) or null
  const void* skip;     // as y, or null
  void* y;              // (batch, out_height, out_width, filter_count)
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t channels;
  int64_t filter_count;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t out_height;
  int64_t out_width;
  int64_t stride_height;
  int64_t stride_width;
  int64_t dilation_height;
  int64_t dilation_width;
  int64_t pad_top;
  int64_t pad_left;
  int64_t pad_bottom;
  int64_t pad_right;
  int64_t groups;

  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels, filter_count, kernel_height, kernel_width}) {
      text += "_" + std::to_string(size);
    }
    if (stride_height * stride_width > 1) {
      text += "_s" + std::to_string(stride_height) + "x" + std::to_string(stride_width);
    }
    if (dilation_height * dilation_width > 1) {
      text += "_d" + std::to_string(dilation_height) + "x" + std::to_string(dilation_width);
    }
    text += "_p";
    for (int64_t pad : {pad_top, pad_left, pad_bottom, pad_right}) text += std::to_string(pad);
    if (groups > 1) text += "_g" + std::to_string(groups);
    return text + (bias == nullptr ? "" : "_bias") + (skip == nullptr ? "" : "_skip");
  }
  std::vector<Output> outputs() const {
    return {{y, static_cast<size_t>(batch * out_height * out_width * filter_count), dtype}};
  }
};

// A thread an element, no library: any shape, slowly.
const char* nhwc_conv_launch(const NhwcConvParams& params, void* stream);

}  // namespace sd_ort
