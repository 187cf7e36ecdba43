// SwiGlu(gate, up?; quantized_scale) -> Y?, quantized?: Y = silu(gate) * up (Shazeer 2020, "GLU Variants Improve
// Transformer"). gate, up and Y are (..., C). Without up, gate is (..., 2 * C): its halves along the last axis are gate
// and up. quantized is Y / quantized_scale in float8.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct SwiGluParams {
  DType dtype;
  const void* gate;  // (rows, columns), rows `stride` elements apart
  const void* up;    // the same
  void* y;           // (rows, columns), contiguous, or null
  int64_t rows;
  int64_t columns;
  int64_t stride;               // columns, or twice as many for the halves of one tensor
  Float8Output quantized = {};  // as y

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(columns) +
           (stride == columns ? "" : "_halves") + quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(rows * columns);
    return {{y, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

struct SwiGluConfig {
  bool vectors;  // accesses of 16 bytes, which sizes and addresses must allow; else of one element
  int block;     // threads: 128, 256 or 512; 256 without vectors
};

const char* swiglu_launch(const SwiGluParams& params, const SwiGluConfig& config, void* stream);

}  // namespace sd_ort
