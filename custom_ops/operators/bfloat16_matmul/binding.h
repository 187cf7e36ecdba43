// Binding of Bfloat16MatMul.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "common/packed_weights.h"
#include "operators/bfloat16_matmul/op.h"

namespace sd_ort {

SD_ORT_BFLOAT16_KERNEL(bfloat16_matmul, Bfloat16MatMulParams)

struct Bfloat16MatMulBinding {
  using Params = Bfloat16MatMulParams;
  using State = PackedWeights;
  static constexpr const char* kName = "Bfloat16MatMul";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kAny}, {Port::kAny, true}};  // X, W, bias
  static constexpr Port kOutputs[] = {{Port::kU}};                                   // Y
  static constexpr bool kBFloat16 = true;
  static constexpr size_t kConstant = 1;

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.gated = attributes.integer("gated", 0) != 0;
    params.y_dtype = attributes.integer("to", kFloat) == kBFloat ? DType::kBFloat16 : DType::kFloat32;
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0) || !shapes.has(1)) return;
    std::vector<Dim> dims = shapes.input(0);
    dims.back() = shapes.input(1).back();
    if (shapes.integer("gated", 0) != 0) dims.back() = dims.back().known() ? Dim{dims.back().value / 2, ""} : Dim{};
    shapes.set_typed_output(dims, static_cast<ONNXTensorElementDataType>(shapes.integer("to", kFloat)));
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), weight = tensors.input(1), bias = tensors.input(2);
    require(params.dtype != DType::kFloat16, "Bfloat16MatMul: X must be float32 or bfloat16");
    params.weight_dtype = weight.dtype();
    require(params.weight_dtype != DType::kFloat16, "Bfloat16MatMul: W must be bfloat16 or float32");
    require(!x.shape.empty() && weight.shape.size() == 2 && weight.shape[0] == x.shape.back(),
            "Bfloat16MatMul: W must be (K, N), K the last axis of X");
    params.inner = weight.shape[0];
    params.columns = weight.shape[1];
    require(!bias || (bias.has_shape({params.columns}) && bias.dtype() == DType::kFloat32),
            "Bfloat16MatMul: bias must have one float32 number a column of W");
    require(!params.gated || params.columns % 2 == 0, "Bfloat16MatMul: gated, W must have an even number of columns");
    std::vector<int64_t> shape = x.shape;
    shape.back() = params.gated ? params.columns / 2 : params.columns;
    params.x = x.data;
    params.weight = weight.data;
    params.bias = bias.data;
    params.y = tensors.output(0, shape);
    params.rows = Tensor{params.y, shape}.rows();
  }

  static void cpu(const Params& call, const Parallel& parallel) {
    if (call.rows == 0 || call.columns == 0) return;
    Params params = call;
    PackedWeights temporary;
    PackedWeights& weights = params.packed_weights == nullptr ? temporary : *params.packed_weights;
    params.packed = weights.get(
        {params.weight, params.weight_dtype, params.inner, 1, params.columns, params.columns, 1, params.gated != 0},
        parallel);
    bfloat16_matmul_cpu(params, parallel);
  }

 private:
  static constexpr int64_t kFloat = 1, kBFloat = 16;  // TensorProto.DataType
};

}  // namespace sd_ort
