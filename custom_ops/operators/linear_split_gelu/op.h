// LinearSplitGelu(X, W, bias) -> Y: a complete GEGLU layer. With V = X W + bias split in halves along the last axis, Y
// is left * gelu(right), gelu by the error function. X is (..., K), W (K, D), bias (D), Y (..., D / 2), for any even D.
// Among ONNX Runtime providers only the sd-ort provider has it; torch calls it too.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct LinearSplitGeluParams {
  DType dtype;
  const void* x;       // (rows, inner)
  const void* weight;  // (inner, 2 * half)
  const void* bias;    // (2 * half)
  void* y;             // (rows, half)
  int64_t rows;
  int64_t inner;  // K
  int64_t half;   // D / 2

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(inner) + "x" +
           std::to_string(2 * half);
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(rows * half), dtype}}; }
};

// GEMM with the gate in its epilogue, by warpgroup instructions.
bool linear_split_gelu_supports_warpgroups(const LinearSplitGeluParams& params);
const char* linear_split_gelu_warpgroups(const LinearSplitGeluParams& params, void* stream);

}  // namespace sd_ort
