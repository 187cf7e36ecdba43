// Softmax of rows: weights = exp(scores - largest) / sum, scores in float32. Not an operator of ONNX Runtime: what
// attention runs between two products (multi_head_attention/candidates.cc).
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
  static constexpr int64_t kMostHeld = 16384;  // numbers that a block's registers hold
  bool in_registers;                           // rows of up to kMostHeld numbers, read once; else three times
  bool vectors;                                // 4 numbers an access; else one
};

// What suits a call: candidates.cc.
SoftmaxConfig softmax_default(const SoftmaxParams& params);
const char* softmax_launch(const SoftmaxParams& params, const SoftmaxConfig& config, void* stream);

}  // namespace sd_ort
