// Binding of WinogradConv.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/winograd_conv/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(winograd_conv, WinogradConvParams)

struct WinogradConvBinding : BindingBase<WinogradConvParams, winograd_conv_cpu> {
  static constexpr const char* kName = "WinogradConv";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT}};  // X, W, B
  static constexpr Port kOutputs[] = {{Port::kT}};                         // Y

  static void infer(Shapes& shapes) {
    if (!shapes.has(0) || !shapes.has(1)) return;
    std::vector<Dim> dims = shapes.input(0);
    dims.at(1) = shapes.input(1)[0];
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), filters = tensors.input(1), bias = tensors.input(2);
    require(x.shape.size() == 4, "WinogradConv: X must be (N, C, H, W)");
    params.batch = x.shape[0];
    params.channels = x.shape[1];
    params.height = x.shape[2];
    params.width = x.shape[3];
    require(filters.shape.size() == 4 && filters.has_shape({filters.shape[0], params.channels, 3, 3}),
            "WinogradConv: W must be (M, C, 3, 3), with the channels of X");
    params.filter_count = filters.shape[0];
    require(bias.has_shape({params.filter_count}), "WinogradConv: B must have one element a filter");
    params.x = x.data;
    params.filters = filters.data;
    params.bias = bias.data;
    params.y = tensors.output(0, {params.batch, params.filter_count, params.height, params.width});
  }
};

}  // namespace sd_ort
