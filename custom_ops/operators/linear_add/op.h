// LinearAdd(X, W, bias?, skip?) -> Y: X W + bias + skip, with bias and residual in the epilogue of the GEMM, or, with
// `gelu`, tanh's approximation of GELU of X W + bias. X is (..., K), W (K, N), bias (N), skip and Y (..., N).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct LinearAddParams {
  DType dtype;
  const void* x;       // (rows, inner)
  const void* weight;  // (inner, columns)
  const void* bias;    // (columns) or null
  const void* skip;    // (rows, columns) or null
  void* y;             // (rows, columns)
  int64_t rows;
  int64_t inner;    // K
  int64_t columns;  // N
  int32_t gelu;     // 1: Y = gelu(X W + bias), without skip

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(inner) + "x" +
           std::to_string(columns) + (bias == nullptr ? "" : "_bias") + (skip == nullptr ? "" : "_skip") +
           (gelu ? "_gelu" : "");
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(rows * columns), dtype}}; }
};

// Generic kernel: one thread per element, any shape, slow.
const char* linear_add_launch(const LinearAddParams& params, void* stream);

// The tile kernel of NhwcConv, for fp16 and bf16 (launch_config.cc).
bool linear_add_tiles_supports(const LinearAddParams& params);
size_t linear_add_tiles_workspace(const LinearAddParams& params);
const char* linear_add_tiles_launch(const LinearAddParams& params, void* workspace, void* stream);

}  // namespace sd_ort
