// Bfloat16MatMul(X, W, bias?; gated = 0, to = 1) -> Y: X W + bias, X and W rounded to bfloat16, sums in float32. X is
// (..., K), W (K, N) and Y (..., N), each in float32 or bfloat16 (Y by `to`, an ONNX TensorProto.DataType), bias (N) in
// float32. With gated = 1 Y is (..., N / 2), left * gelu(right) of the halves of its last axis (Shazeer 2020, GEGLU).
// For CPUs with AMX; others compute the same with vectors.
#pragma once

#include "common/op.h"

namespace sd_ort {

class PackedWeights;

struct Bfloat16MatMulParams {
  DType dtype;         // of x: float32 or bfloat16
  DType weight_dtype;  // float32 or bfloat16
  DType y_dtype;       // float32 or bfloat16
  int32_t gated;
  const void* x;       // (rows, inner)
  const void* weight;  // (inner, columns)
  const void* bias;    // (columns) or null
  void* y;             // (rows, columns), or half the columns where gated
  int64_t rows;
  int64_t inner;
  int64_t columns;
  PackedWeights* packed_weights;  // of the node if its weight is constant, else null
  const uint16_t* packed;         // packed weight, set before the kernel runs
};

}  // namespace sd_ort
