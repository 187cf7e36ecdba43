// The provider's own kernels, as plain functions: what of ai.onnx a fused graph still has. Each launches on the stream
// and returns null or a message.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/op.h"

namespace sd_ort {

constexpr int kMostAxes = 8;

// Elements moved from one strided layout to another: element (i0, i1, ...) lies at sum(i * stride) in both.
struct StridedCopy {
  const void* from;
  void* to;
  int element_bytes;  // 1, 2, 4 or 8
  int axes;
  int64_t sizes[kMostAxes];
  int64_t from_strides[kMostAxes];  // in elements; 0 repeats
  int64_t to_strides[kMostAxes];
};
const char* strided_copy(const StridedCopy& copy, void* stream);

// Parts laid side by side in rows, or taken apart: columns `begins[i]` to `begins[i + 1]` of `joined`, (rows, width),
// are parts[i], (rows, begins[i + 1] - begins[i]). Null parts are left out.
constexpr int kMostParts = 32;
struct Join {
  void* joined;
  void* parts[kMostParts];
  int32_t begins[kMostParts + 1];  // in elements of the row
  int32_t width;                   // of the whole row
  int32_t count;
  int element_bytes;  // 1, 2, 4 or 8
  int64_t rows;
  bool apart;
};
const char* join(const Join& join, void* stream);

// Every element of `to` made the element at `value`, which the host reads.
const char* fill(void* to, int64_t count, const void* value, int element_bytes, void* stream);

// to (outer, indices, inner) = from (outer, size, inner) at indices, negative ones counted from the end.
struct GatherCall {
  const void* from;
  const void* indices;  // int32 or int64
  void* to;
  bool wide;  // int64
  int element_bytes;
  int64_t outer, size, count, inner;
};
const char* gather(const GatherCall& call, void* stream);

// to (count, inner) = from at the tuples `indices` (count, depth) of int64, into its first `depth` axes.
struct GatherNdCall {
  const void* from;
  const int64_t* indices;
  void* to;
  int element_bytes;
  int depth;
  int64_t sizes[kMostAxes];    // of the first axes
  int64_t strides[kMostAxes];  // theirs, in elements
  int64_t count, inner;
};
const char* gather_nd(const GatherNdCall& call, void* stream);

// to = from with `before` more elements at each axis's begin and some at its end, all `value`.
struct PadCall {
  const void* from;
  void* to;
  int element_bytes;
  uint64_t value;  // its bits
  int axes;
  int64_t from_sizes[kMostAxes], to_sizes[kMostAxes], before[kMostAxes];
};
const char* pad(const PadCall& call, void* stream);

// Nearest resize: to (i0, i1, ...) = from (floor(i0 * step0), ...), as `asymmetric` and `floor` of ai.onnx::Resize.
struct ResizeCall {
  const void* from;
  void* to;
  int element_bytes;
  int axes;
  int64_t from_sizes[kMostAxes], to_sizes[kMostAxes];
  float steps[kMostAxes];
};
const char* resize_nearest(const ResizeCall& call, void* stream);

enum class Unary {
  kAbs,
  kCos,
  kErf,
  kExp,
  kGelu,
  kGeluTanh,
  kLog,
  kNeg,
  kQuickGelu,
  kReciprocal,
  kRelu,
  kRound,
  kSigmoid,
  kSin,
  kSilu,
  kSqrt,
  kTanh
};
// y = op(x); alpha is QuickGelu's.
const char* unary(Unary op, DType dtype, const void* x, void* y, int64_t count, float alpha, void* stream);

enum class Binary { kAdd, kDiv, kMax, kMin, kMul, kPow, kSub };
// Two inputs broadcast to one shape.
struct Broadcast {
  int axes;
  int64_t sizes[kMostAxes];
  int64_t a_strides[kMostAxes], b_strides[kMostAxes];  // in elements; 0 repeats
  int64_t condition_strides[kMostAxes];                // Where's
};
const char* binary(Binary op, DType dtype, const Broadcast& shape, const void* a, const void* b, void* y, void* stream);

enum class Number { kFloat32, kFloat16, kBFloat16, kFloat64, kInt32, kInt64, kUInt8, kBool };
// The same of int32 or int64 numbers; Add, Max, Min, Mul and Sub.
const char* binary_integers(Binary op, Number type, const Broadcast& shape, const void* a, const void* b, void* y,
                            void* stream);
// y = a == b, of bool, for every type of Number.
const char* equal(Number type, const Broadcast& shape, const void* a, const void* b, void* y, void* stream);
// y = x between two numbers on the device, either of which may be null for none.
const char* clip(DType dtype, const void* x, const void* low, const void* high, void* y, int64_t count, void* stream);
const char* where(const Broadcast& shape, const void* condition, const void* a, const void* b, void* y,
                  int element_bytes, void* stream);

const char* cast(Number from_type, const void* from, Number to_type, void* to, int64_t count, void* stream);

enum class Reduction { kMax, kMean, kMin, kSum };
// y (outer, inner) over the middle axis of x (outer, size, inner), in float32.
const char* reduce(Reduction op, DType dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner,
                   void* stream);

// Rows of softmax(x), in float32.
const char* softmax_rows(DType dtype, const void* x, void* y, int64_t rows, int64_t columns, void* stream);

// Rows of (x - mean) / sqrt(variance + epsilon) * gamma + beta; beta may be null.
const char* layer_norm_rows(DType dtype, const void* x, const void* gamma, const void* beta, void* y, int64_t rows,
                            int64_t columns, float epsilon, void* stream);

// Y (batch, rows, columns) = scale X W + bias: X (batch, rows, inner), W (batch, inner, columns) or, transposed,
// (batch, columns, inner), bias (columns) or null. A batch stride of 0 repeats a matrix.
struct ProductParams {
  DType dtype;
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  int64_t batch, rows, inner, columns;
  int64_t x_batch_stride, weight_batch_stride;
  int32_t transposed;
  float scale;

  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, rows, inner, columns}) text += "_" + std::to_string(size);
    if (batch > 1 && x_batch_stride == 0) text += "_one_x";
    if (batch > 1 && weight_batch_stride == 0) text += "_one_w";
    return text + (transposed ? "_t" : "") + (bias == nullptr ? "" : "_bias");
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(batch * rows * columns), dtype}}; }
};
const char* product_launch(const ProductParams& params, void* stream);

}  // namespace sd_ort
