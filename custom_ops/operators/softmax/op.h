// Softmax of rows: weights = exp(scores - max) / sum, scores in float32. Not an operator of ONNX Runtime: attention
// runs it between two GEMMs (multi_head_attention/candidates.cc).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct SoftmaxParams {
  DType dtype;         // of weights
  const void* scores;  // (rows, columns), float32
  void* weights;       // (rows, columns)
  int64_t rows;
  int64_t columns;

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(columns);
  }
  std::vector<Output> outputs() const { return {{weights, static_cast<size_t>(rows * columns), dtype}}; }
};

struct SoftmaxConfig {
  static constexpr int64_t kMaxColumns = 16384;  // elements that fit the registers of a block
  bool in_registers;                             // rows of up to kMaxColumns elements, read once; else three times
  bool vectors;                                  // accesses of 4 elements; else of one
};

// Default configuration of a call (candidates.cc).
SoftmaxConfig softmax_default(const SoftmaxParams& params);
const char* softmax_launch(const SoftmaxParams& params, const SoftmaxConfig& config, void* stream);

}  // namespace sd_ort
