// AdaptiveNorm(X, scale, shift?, gate?, skip?; quantized_scale) -> Y?, sum?, quantized?
//
// sum = gate * X + skip; Y = (sum - mean) / sqrt(variance + epsilon) * scale + shift over the last axis. With rms, mean
// is 0 and variance the mean of the squares. X, skip, Y and sum are (B, ..., C); scale, shift and gate are (C) or one
// row for each image (B, 1, ..., C). An absent gate is 1, an absent skip or shift 0.
// quantized is Y / quantized_scale in float8.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct AdaptiveNormParams {
  DType dtype;
  const void* x;      // (rows, channels)
  const void* scale;  // (rows / scale_rows, channels)
  const void* shift;  // as scale, or null
  const void* gate;   // (rows / gate_rows, channels) or null
  const void* skip;   // (rows, channels) or null
  void* y;            // (rows, channels) or null
  void* sum;          // (rows, channels) or null
  int64_t rows;
  int64_t channels;
  int64_t scale_rows;  // rows of x for each row of scale and shift
  int64_t gate_rows;   // rows of x for each row of gate; 1 without a gate
  float epsilon;
  int32_t rms;
  Float8Output quantized;  // as y

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(channels) +
           (rms ? "_rms" : "") + (skip == nullptr ? "" : "_skip") + (sum == nullptr ? "" : "_sum") +
           quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(rows * channels);
    return {{y, count, dtype}, {sum, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

struct AdaptiveNormConfig {
  bool vectors;  // accesses of 16 bytes, which sizes and addresses must allow; else of one element
  int lanes;     // threads per row: 16 or 128 with vectors, or 256; with 128 a row is read once, into registers
};

constexpr int64_t kAdaptiveNormRegisterBytes = 128 * 4 * 16;  // longest row of 128 threads

const char* adaptive_norm_launch(const AdaptiveNormParams& params, const AdaptiveNormConfig& config, void* stream);

}  // namespace sd_ort
