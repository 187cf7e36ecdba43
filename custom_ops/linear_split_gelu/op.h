// LinearSplitGelu(X, W, bias) -> Y: with V = X W + bias split in halves along the last axis, left * gelu(right), gelu
// by the error function: a product and BiasSplitGelu. X is (..., K), W (K, 2 N), bias (2 N), Y (..., N).
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
  int64_t half;   // N

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(inner) + "x" +
           std::to_string(2 * half);
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(rows * half), dtype}}; }
};

}  // namespace sd_ort
