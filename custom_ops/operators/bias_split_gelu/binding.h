// Binding of BiasSplitGelu.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/bias_split_gelu/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(bias_split_gelu, BiasSplitGeluParams)

struct BiasSplitGeluBinding : BindingBase<BiasSplitGeluParams, bias_split_gelu_cpu> {
  static constexpr const char* kName = "BiasSplitGelu";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}};                    // X, bias
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kFloat8, true}};  // Y, quantized

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    Dim& last = dims.back();
    last = last.known() ? Dim{last.value / 2, ""} : Dim{};  // half of a symbol has no name
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), bias = tensors.input(1);
    require(!x.shape.empty() && x.shape.back() % 2 == 0, "BiasSplitGelu: the last axis of X must be even");
    require(bias.has_shape({x.shape.back()}), "BiasSplitGelu: bias must have as many elements as the last axis of X");
    params.half = x.shape.back() / 2;
    params.rows = x.rows();
    params.x = x.data;
    params.bias = bias.data;
    std::vector<int64_t> shape = x.shape;
    shape.back() = params.half;
    params.y = tensors.output(0, shape);
    params.quantized = tensors.float8_output(1, shape, params.quantized.scale);
  }
};

}  // namespace sd_ort
