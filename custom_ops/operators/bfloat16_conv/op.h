// Bfloat16Conv(X, W, B?; stride = 1, x_last = 0, y_last = 0) -> Y: ai.onnx::Conv with 3 x 3 filters and pads 1, or 1 x
// 1 filters without pads; stride 1 or 2, dilation 1, one group; X and W rounded to bfloat16, sums in float32. X is (N,
// C, H, W), W (M, C, k, k) in float32 or bfloat16, B (M), Y (N, M, ceil(H / stride), ceil(W / stride)). With x_last = 1
// X is (N, H, W, C), and with y_last = 1 Y is (N, H, W, M): only for 1 x 1 filters with stride 1, whose pixels are
// rows. For CPUs with AMX; others compute the same with vectors.
//
// QuantizedConv(X, W, scale, B; the same attributes) -> Y: the same of X and W in int8, with exact sums times scale,
// float32, one number or (M): the scale of X times that of W.
#pragma once

#include "common/op.h"

namespace sd_ort {

class PackedWeights;

struct Bfloat16ConvParams {
  DType dtype;          // of x, bias and y: float32
  DType weight_dtype;   // float32 or bfloat16; or int8, then x is int8, too
  const void* x;        // (batch, channels, height, width)
  const void* filters;  // (filter_count, channels, edge, edge)
  const void* bias;     // (filter_count) or null
  void* y;              // (batch, filter_count, out_height, out_width)
  int64_t batch;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t filter_count;
  int64_t edge;    // 1 or 3
  int64_t stride;  // 1 or 2
  int32_t x_last;  // x is channels last
  int32_t y_last;
  PackedWeights* packed_weights;  // of the node if its filters are constant, else null
  const uint16_t* packed;         // packed filters, set before the kernel runs
  const float* scale;             // (scales) of int8
  int32_t scales;                 // 1 for all filters, else 0: one a filter

  bool int8() const { return weight_dtype == DType::kInt8; }
};

}  // namespace sd_ort
