// Kernels of ai.onnx operators that remain in fused graphs, as plain functions. Each launches on the stream and returns
// null or an error message.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/op.h"

namespace sd_ort {

constexpr int kMaxAxes = 8;

// A copy between strided layouts: element (i0, i1, ...) is at offset sum(i * stride) in both.
struct StridedCopy {
  const void* from;
  void* to;
  int element_bytes;  // 1, 2, 4 or 8
  int axes;
  int64_t sizes[kMaxAxes];
  int64_t from_strides[kMaxAxes];  // in elements; 0 repeats
  int64_t to_strides[kMaxAxes];
};
const char* strided_copy(const StridedCopy& copy, void* stream);

// Concat or Split along columns: columns `begins[i]` to `begins[i + 1]` of `full` (rows, width) are parts[i]
// (rows, begins[i + 1] - begins[i]). Null parts are skipped.
constexpr int kMaxParts = 32;
struct ConcatCall {
  void* full;
  void* parts[kMaxParts];
  int32_t begins[kMaxParts + 1];  // in elements of the row
  int32_t width;                  // columns of `full`
  int32_t count;
  int element_bytes;  // 1, 2, 4 or 8
  int64_t rows;
  bool split;  // copies from `full` to the parts
};
const char* concat(const ConcatCall& call, void* stream);

// Sets every element of `to` to the element at host address `value`.
const char* fill(void* to, int64_t count, const void* value, int element_bytes, void* stream);

// to (outer, indices, inner) = from (outer, size, inner) at indices, negative ones counted from the end.
struct GatherCall {
  const void* from;
  const void* indices;  // int32 or int64
  void* to;
  bool int64_indices;
  int element_bytes;
  int64_t outer, size, count, inner;
};
const char* gather(const GatherCall& context, void* stream);

// to (count, inner) = from at `indices` (count, depth) of int64, which index its first `depth` axes.
struct GatherNdCall {
  const void* from;
  const int64_t* indices;
  void* to;
  int element_bytes;
  int depth;
  int64_t sizes[kMaxAxes];    // of the first `depth` axes
  int64_t strides[kMaxAxes];  // of the first `depth` axes, in elements
  int64_t count, inner;
};
const char* gather_nd(const GatherNdCall& context, void* stream);

// to = from with `before` elements of `value` at the begin of each axis and the rest at its end.
struct PadCall {
  const void* from;
  void* to;
  int element_bytes;
  uint64_t value;  // bits of the element
  int axes;
  int64_t from_sizes[kMaxAxes], to_sizes[kMaxAxes], before[kMaxAxes];
};
const char* pad(const PadCall& context, void* stream);

// Nearest resize: to (i0, i1, ...) = from (floor(i0 * step0), ...), as `asymmetric` and `floor` of ai.onnx::Resize.
struct ResizeCall {
  const void* from;
  void* to;
  int element_bytes;
  int axes;
  int64_t from_sizes[kMaxAxes], to_sizes[kMaxAxes];
  float steps[kMaxAxes];
};
const char* resize_nearest(const ResizeCall& context, void* stream);

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
// Two inputs (three of Where) broadcast to one shape.
struct Broadcast {
  int axes;
  int64_t sizes[kMaxAxes];
  int64_t a_strides[kMaxAxes], b_strides[kMaxAxes];  // in elements; 0 repeats
  int64_t condition_strides[kMaxAxes];               // of Where
};
const char* binary(Binary op, DType dtype, const Broadcast& shape, const void* a, const void* b, void* y, void* stream);

enum class ElementType { kFloat32, kFloat16, kBFloat16, kFloat64, kInt32, kInt64, kUInt8, kBool };
// y = op(a, b) of int32 or int64: Add, Max, Min, Mul and Sub.
const char* binary_integers(Binary op, ElementType type, const Broadcast& shape, const void* a, const void* b, void* y,
                            void* stream);
enum class Comparison { kEqual, kGreater };
// y = op(a, b) as bool, for every ElementType.
const char* compare(Comparison op, ElementType type, const Broadcast& shape, const void* a, const void* b, void* y,
                    void* stream);
// y = x clipped to the device scalars low and high; null means no bound.
const char* clip(DType dtype, const void* x, const void* low, const void* high, void* y, int64_t count, void* stream);
const char* where(const Broadcast& shape, const void* condition, const void* a, const void* b, void* y,
                  int element_bytes, void* stream);

const char* cast(ElementType from_type, const void* from, ElementType to_type, void* to, int64_t count, void* stream);

// y = x / *scale in float8 or int8 (`eight_bits`), rounded to nearest even and saturated; *scale is of dtype.
const char* quantize(DType dtype, const void* x, const void* scale, DType eight_bits, void* y, int64_t count,
                     void* stream);

// How elements of x are stored in DequantizeLinear; two of 4 bits a byte, the first one in the low half.
enum class StoredType { kInt8, kUInt8, kInt4, kUInt4, kFloat8 };
// y (outer, size, inner) = (x - zero point) * scale. The scale, and the zero point of the type of x, of element
// (o, s, i) has index o * outer_stride + s / block * block_stride + i * inner_stride.
struct DequantizeCall {
  StoredType type;
  const void* x;
  const void* scale;        // of the type of y
  const void* zero_points;  // or null
  void* y;
  int64_t outer, size, inner, block;
  int64_t outer_stride, block_stride, inner_stride;
};
const char* dequantize(DType dtype, const DequantizeCall& call, void* stream);

enum class Reduction { kMax, kMean, kMin, kSum };
// y (outer, inner) reduces the middle axis of x (outer, size, inner) in float32.
const char* reduce(Reduction op, DType dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner,
                   void* stream);

// Softmax of each row, in float32.
const char* softmax_rows(DType dtype, const void* x, void* y, int64_t rows, int64_t columns, void* stream);

// Y (batch, rows, columns) = scale X W + bias: X (batch, rows, inner), W (batch, inner, columns) or, transposed,
// (batch, columns, inner), bias (columns) or null. A batch stride of 0 broadcasts a matrix.
struct GemmParams {
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
const char* gemm_launch(const GemmParams& params, void* stream);

}  // namespace sd_ort
