// UpsampleConvWeight: the weight of a 3 x 3 convolution of a doubled image, as that of a transposed convolution of the
// image before it is doubled (4 x 4 taps, stride 2, padding 1), which does 4/9 of the arithmetic. Not an operator of
// ONNX Runtime: weights of graphs are constants (fusion_passes); in torch they may change from call to call.
//
// Doubling is itself a transposed convolution, with 2 x 2 taps of one. The two together have the sums of 2 x 2
// neighbors of the turned 3 x 3 taps, zeros around them: y[c, i, j, f] = the sum of weight[f, 2 - i : 4 - i, 2 - j : 4
// - j, c].
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
