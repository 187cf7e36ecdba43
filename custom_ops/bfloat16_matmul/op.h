// Bfloat16MatMul(X, W, bias?) -> Y: X W + bias, X and W rounded to bfloat16, sums in float32. X is (..., K), W (K, N)
// in float32 or bfloat16, bias (N), Y (..., N). For CPUs with matrix units; others compute the same with vectors.
#pragma once

#include "common/op.h"

namespace sd_ort {

class PackedWeights;

struct Bfloat16MatMulParams {
  DType dtype;         // of x, bias and y: float32
  DType weight_dtype;  // float32 or bfloat16
  const void* x;       // (rows, inner)
  const void* weight;  // (inner, columns)
  const void* bias;    // (columns) or null
  void* y;             // (rows, columns)
  int64_t rows;
  int64_t inner;
  int64_t columns;
  PackedWeights* kept;     // of the node whose weight is constant, or null
  const uint16_t* packed;  // made of weight before the kernel runs
};

}  // namespace sd_ort
