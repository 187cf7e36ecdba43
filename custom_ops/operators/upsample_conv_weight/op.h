// UpsampleConvWeight: weight of the transposed convolution (4 x 4 taps, stride 2, padding 1) that equals nearest 2x
// upsampling followed by a 3 x 3 convolution, with 4/9 of the arithmetic. Not an operator of ONNX Runtime: graphs have
// constant weights, which fusion_passes transforms; in torch the weight may change between calls.
//
// 2x upsampling is a transposed convolution with 2 x 2 taps of one. The combination has the sums of 2 x 2 adjacent taps
// of the flipped, zero-padded 3 x 3 filter: y[c, i, j, f] = sum of weight[f, 2 - i : 4 - i, 2 - j : 4 - j, c].
#pragma once

#include "common/op.h"

namespace sd_ort {

struct UpsampleConvWeightParams {
  DType dtype;
  const void* weight;  // (filters, 3, 3, channels)
  void* y;             // (channels, 4, 4, filters), summed in float32
  int64_t filters;
  int64_t channels;

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(filters) + "x" + std::to_string(channels);
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(channels * 16 * filters), dtype}}; }
};

const char* upsample_conv_weight_launch(const UpsampleConvWeightParams& params, void* stream);

}  // namespace sd_ort
