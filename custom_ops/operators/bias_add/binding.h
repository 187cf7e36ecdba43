// BiasAdd as ONNX Runtime sees it.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/bias_add/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(bias_add, BiasAddParams)

struct BiasAddBinding {
  using Params = BiasAddParams;
  static constexpr const char* kName = "BiasAdd";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT, true}};  // X, bias, skip
  static constexpr Port kOutputs[] = {{Port::kT}};                               // Y

  static Params attributes(const Attributes&) { return {}; }

  static void infer(Shapes& shapes) {
    if (shapes.has(0)) shapes.set_output(0, shapes.input(0));
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), bias = tensors.input(1), skip = tensors.input(2);
    require(x.shape.size() >= 1 && (!skip || skip.shape == x.shape), "BiasAdd: skip must have the shape of X");
    params.channels = x.shape.back();
    require(bias.has_shape({params.channels}), "BiasAdd: bias must have as many elements as the last axis of X");
    params.rows = x.rows();
    params.x = x.data;
    params.bias = bias.data;
    params.skip = skip.data;
    params.y = tensors.output(0, x.shape);
  }

  static void cpu(const Params& params, const Parallel& parallel) { bias_add_cpu(params, parallel); }
};

}  // namespace sd_ort
