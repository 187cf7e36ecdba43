// Binding of BiasAdd.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/bias_add/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(bias_add, BiasAddParams)

struct BiasAddBinding : BindingBase<BiasAddParams, bias_add_cpu> {
  static constexpr const char* kName = "BiasAdd";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT, true}};  // X, bias, skip
  static constexpr Port kOutputs[] = {{Port::kT}};                               // Y

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
};

}  // namespace sd_ort
