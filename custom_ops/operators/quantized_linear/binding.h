// Binding of QuantizedLinear.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "common/packed_weights.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(quantized_linear, QuantizedLinearParams)

struct QuantizedLinearBinding {
  using Params = QuantizedLinearParams;
  using State = PackedWeights;
  static constexpr const char* kName = "QuantizedLinear";
  // X, W, scale, bias, skip
  static constexpr Port kInputs[] = {{Port::kAny}, {Port::kAny}, {Port::kAny}, {Port::kT}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kFloat8, true}};  // Y, quantized
  static constexpr size_t kConstant = 1;
  static constexpr size_t kTypedBy = 3;  // T is the type of bias

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.gelu = attributes.integer("gelu", 0) != 0;
    params.gated = attributes.integer("gated", 0) != 0;
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0) || !shapes.has(1)) return;
    std::vector<Dim> dims = shapes.input(0);
    dims.back() = shapes.input(1).front();
    if (shapes.integer("gated", 0) != 0) dims.back() = dims.back().known() ? Dim{dims.back().value / 2, ""} : Dim{};
    shapes.set_output(dims, kTypedBy);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), weight = tensors.input(1), scale = tensors.input(2), bias = tensors.input(3),
                 skip = tensors.input(4);
    require(x.type == weight.type &&
                (x.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN || x.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8),
            "QuantizedLinear: X and W must both be float8e4m3fn or both int8");
    params.eight_bits = x.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? DType::kInt8 : DType::kFloat8;
    require(!x.shape.empty() && weight.shape.size() == 2 && weight.shape[1] == x.shape.back(),
            "QuantizedLinear: W must be (N, K), K the last axis of X");
    params.columns = weight.shape[0];
    params.inner = weight.shape[1];
    require(scale.is_scale_of(params.columns), "QuantizedLinear: scale must be one float32 number, or one a row of W");
    params.scales = scale.size() == 1;
    require(bias.has_shape({params.columns}), "QuantizedLinear: bias must have one element a row of W");
    require(!params.gated || params.columns % 2 == 0, "QuantizedLinear: gated, W must have an even number of rows");
    require(!skip || (params.gelu == 0 && params.gated == 0),
            "QuantizedLinear: with gelu or gated there must be no skip");
    std::vector<int64_t> shape = x.shape;
    shape.back() = params.y_columns();
    require(!skip || skip.shape == shape, "QuantizedLinear: skip must have the shape of Y");
    params.x = x.data;
    params.weight = weight.data;
    params.scale = static_cast<const float*>(scale.data);
    params.bias = bias.data;
    params.skip = skip.data;
    params.y = tensors.output(0, shape);
    params.quantized = tensors.float8_output(1, shape, params.quantized.scale);
    params.rows = Tensor{params.x, shape}.rows();
  }

  static void cpu(const Params& call, const Parallel& parallel) {
    Params params = call;
    PackedWeights temporary;
    PackedWeights& weights = params.packed_weights == nullptr ? temporary : *params.packed_weights;
    if (params.eight_bits == DType::kInt8 && params.rows > 0 && params.columns > 0) {
      params.packed = weights.get(
          {params.weight, DType::kInt8, params.inner, 1, params.columns, 1, params.inner, params.gated != 0}, parallel);
    }
    quantized_linear_cpu(params, parallel);
  }
};

}  // namespace sd_ort
