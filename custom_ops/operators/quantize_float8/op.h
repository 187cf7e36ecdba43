// QuantizeFloat8: elements of X / scale in float8 (e4m3fn), rounded to nearest even and saturated. Not an operator of
// ONNX Runtime: attention runs it after the kernels of libraries (multi_head_attention/candidates.cc).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct QuantizeFloat8Params {
  DType dtype;             // of x
  const void* x;           // (count)
  Float8Output quantized;  // (count)
  int64_t count;

  std::string signature() const { return std::string(name_of(dtype)) + "_" + std::to_string(count); }
  std::vector<Output> outputs() const { return {{quantized.data, static_cast<size_t>(count), DType::kFloat8}}; }
};

// Whether sizes and addresses allow accesses of 16 bytes of x (candidates.cc).
bool quantize_float8_supports_vectors(const QuantizeFloat8Params& params);
const char* quantize_float8_launch(const QuantizeFloat8Params& params, bool vectors, void* stream);

}  // namespace sd_ort
