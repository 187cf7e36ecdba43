// Binding of LinearAdd.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/linear_add/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(linear_add, LinearAddParams)

struct LinearAddBinding : BindingBase<LinearAddParams, linear_add_cpu> {
  static constexpr const char* kName = "LinearAdd";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT, true}, {Port::kT, true}};  // X, W, bias, skip
  static constexpr Port kOutputs[] = {{Port::kT}};                                                 // Y

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.gelu = static_cast<int32_t>(attributes.integer("gelu", 0));
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0) || !shapes.has(1)) return;
    std::vector<Dim> dims = shapes.input(0);
    dims.back() = shapes.input(1).back();
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), weight = tensors.input(1), bias = tensors.input(2), skip = tensors.input(3);
    require(!x.shape.empty() && weight.shape.size() == 2 && weight.shape[0] == x.shape.back(),
            "LinearAdd: W must be (K, N), K the last axis of X");
    params.inner = weight.shape[0];
    params.columns = weight.shape[1];
    std::vector<int64_t> shape = x.shape;
    shape.back() = params.columns;
    require(!bias || bias.has_shape({params.columns}), "LinearAdd: bias must have one element a column of W");
    require(!skip || params.gelu == 0, "LinearAdd: with gelu there must be no skip");
    require(!skip || skip.shape == shape, "LinearAdd: skip must have the shape of Y");
    params.x = x.data;
    params.weight = weight.data;
    params.bias = bias.data;
    params.skip = skip.data;
    params.y = tensors.output(0, shape);
    params.rows = Tensor{params.y, shape}.rows();  // not x.rows(): if K is 0, X is empty and Y is not
  }
};

}  // namespace sd_ort
