// QuantizedLinear(X, W, scale, bias, skip?; gelu, gated, quantized_scale) -> Y?, quantized?: a linear layer of 8-bit
// elements. V = (X W^T) * scale + bias + skip, with sums in float32, in integers exactly; Y is V, with `gelu` tanh's
// approximation of GELU of V, with `gated` left * gelu(right) of V's halves along the last axis (GEGLU), both without
// skip. X is (..., K) and W (N, K), both float8 (e4m3fn) or both int8; scale float32, one number or (N): the scale of X
// times that of W; bias (N) and skip and Y (..., N), with `gated` Y (..., N / 2). quantized is Y / quantized_scale in
// float8.
#pragma once

#include "common/op.h"

namespace sd_ort {

class PackedWeights;

struct QuantizedLinearParams {
  DType dtype;         // of bias, skip and Y
  DType eight_bits;    // of x and weight: kFloat8 or kInt8
  const void* x;       // (rows, inner)
  const void* weight;  // (columns, inner)
  const float* scale;  // (scales)
  const void* bias;    // (columns)
  const void* skip;    // (rows, columns) or null
  void* y;             // (rows, columns), or half the columns if gated; or null
  int64_t rows;
  int64_t inner;    // K
  int64_t columns;  // N
  int32_t scales;   // 1 for all columns, else 0: one a column
  int32_t gelu;
  int32_t gated;
  Float8Output quantized;         // as y
  PackedWeights* packed_weights;  // of the CPU's node if its weight is constant, else null
  const uint16_t* packed;         // packed int8 weight, set before the CPU kernel runs

  int64_t y_columns() const { return gated ? columns / 2 : columns; }
  std::string signature() const {
    return std::string(name_of(eight_bits)) + "_" + name_of(dtype) + "_" + std::to_string(rows) + "x" +
           std::to_string(inner) + "x" + std::to_string(columns) + (scales == 1 ? "" : "_channels") +
           (skip == nullptr ? "" : "_skip") + (gelu ? "_gelu" : "") + (gated ? "_gated" : "") + quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(rows * y_columns());
    const bool uses_units = eight_bits == DType::kFloat8 && dtype != DType::kFloat32;
    return {{y, count, dtype, uses_units ? kFloat8SumNmse * static_cast<double>(inner) : 0},
            {quantized.data, count, DType::kFloat8}};
  }
};

// Generic kernel: tiles of 64 x 64 without matrix units, any shape.
const char* quantized_linear_launch(const QuantizedLinearParams& params, void* stream);

// The e4m3 of the current device's matrix units: that of OCP, or AMD's FNUZ, in which the same bits mean half of the
// value; none for devices without.
enum class Float8Units : int32_t { kNone, kOcp, kFnuz };
Float8Units quantized_linear_units();

// float8 with `gated`, by warpgroup instructions.
bool quantized_linear_supports_warpgroups(const QuantizedLinearParams& params);
const char* quantized_linear_warpgroups(const QuantizedLinearParams& params, void* stream);

}  // namespace sd_ort
