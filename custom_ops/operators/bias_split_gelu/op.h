// BiasSplitGelu(X, bias; quantized_scale) -> Y?, quantized?: with V = X + bias split in halves along the last axis,
// left * gelu(right), gelu by the error function. X is (N, S, D), bias (D), Y (N, S, D / 2), for any even D; quantized
// is Y / quantized_scale in float8. As com.microsoft::BiasSplitGelu.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct BiasSplitGeluParams {
  DType dtype;
  const void* x;                // (rows, 2 * half)
  const void* bias;             // (2 * half)
  void* y;                      // (rows, half) or null
  int64_t rows;                 // N * S
  int64_t half;                 // D / 2
  Float8Output quantized = {};  // as y

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(2 * half) +
           quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(rows * half);
    return {{y, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

struct BiasSplitGeluConfig {
  bool vectors;  // accesses of 16 bytes, which sizes and addresses must allow; else of one element
  int block;     // threads: 128, 256 or 512; 256 without vectors
};

// Configuration of the default candidate, which other operators use.
BiasSplitGeluConfig bias_split_gelu_default(const BiasSplitGeluParams& params);

const char* bias_split_gelu_launch(const BiasSplitGeluParams& params, const BiasSplitGeluConfig& config, void* stream);

}  // namespace sd_ort
