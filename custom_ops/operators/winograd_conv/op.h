// WinogradConv(X, W, B) -> Y: ai.onnx::Conv with 3 x 3 filters, pads 1, strides 1, dilations 1 and one group. X is
// (N, C, H, W), W is (M, C, 3, 3), B is (M), Y is (N, M, H, W). For CPUs: a kernel with fewer multiplications.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct WinogradConvParams {
  DType dtype;
  const void* x;        // (batch, channels, height, width)
  const void* filters;  // (filter_count, channels, 3, 3)
  const void* bias;     // (filter_count)
  void* y;              // (batch, filter_count, height, width)
  int64_t batch;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t filter_count;
};

}  // namespace sd_ort
