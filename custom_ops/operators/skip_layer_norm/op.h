// SkipLayerNormalization(input, skip, gamma, beta?, bias?; quantized_scale) -> output?, (mean), (inv_std_var),
// input_skip_bias_sum?, quantized?
//
// V = input + skip + bias; output = (V - mean) / sqrt(variance + epsilon) * gamma + beta over the last axis, variance
// over n; input_skip_bias_sum = V; quantized is output / quantized_scale in float8. As
// com.microsoft::SkipLayerNormalization, without its two training outputs.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct SkipLayerNormParams {
  DType dtype;
  const void* x;      // (rows, channels)
  const void* skip;   // (skip_rows, channels): row r of x adds row r % skip_rows
  const void* gamma;  // (channels)
  const void* beta;   // (channels) or null
  const void* bias;   // (channels) or null
  void* y;            // (rows, channels) or null
  void* sum;          // (rows, channels) or null
  int64_t rows;
  int64_t skip_rows;
  int64_t channels;
  float epsilon;
  Float8Output quantized;  // as y

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(channels) +
           (sum == nullptr ? "" : "_sum") + quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(rows * channels);
    return {{y, count, dtype}, {sum, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

struct SkipLayerNormConfig {
  static constexpr int kBlock = 256;
  int lanes;  // threads per row: 8, 16, 32 or kBlock; 0: rows of any length in two passes
};

// launch_config.cc: default threads per row (0: two passes), and vectors per thread with `lanes` threads (0:
// unsupported).
int skip_layer_norm_lanes(const SkipLayerNormParams& params);
int skip_layer_norm_items(const SkipLayerNormParams& params, int lanes);

const char* skip_layer_norm_launch(const SkipLayerNormParams& params, const SkipLayerNormConfig& config, void* stream);

}  // namespace sd_ort
