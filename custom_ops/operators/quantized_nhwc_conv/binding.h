// Binding of QuantizedNhwcConv.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/quantized_nhwc_conv/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(quantized_nhwc_conv, QuantizedNhwcConvParams)

struct QuantizedNhwcConvBinding : BindingBase<QuantizedNhwcConvParams, quantized_nhwc_conv_cpu> {
  static constexpr const char* kName = "QuantizedNhwcConv";
  // X, W, scale, B, skip
  static constexpr Port kInputs[] = {{Port::kAny}, {Port::kAny}, {Port::kAny}, {Port::kT}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {{Port::kT}};  // Y
  static constexpr size_t kTypedBy = 3;             // T is the type of B

  static void infer(Shapes&) {}

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), filters = tensors.input(1), scale = tensors.input(2), bias = tensors.input(3),
                 skip = tensors.input(4);
    require(x.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN &&
                filters.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN,
            "QuantizedNhwcConv: X and W must be float8e4m3fn");
    require(x.shape.size() == 4, "QuantizedNhwcConv: X must be (N, H, W, C)");
    params.batch = x.shape[0];
    params.height = x.shape[1];
    params.width = x.shape[2];
    params.channels = x.shape[3];
    require(filters.shape.size() == 4 && filters.has_shape({filters.shape[0], 3, 3, params.channels}),
            "QuantizedNhwcConv: W must be (M, 3, 3, C), with the channels of X");
    params.filter_count = filters.shape[0];
    require(scale.is_scale_of(params.filter_count),
            "QuantizedNhwcConv: scale must be one float32 number, or one a filter");
    params.scales = scale.size() == 1;
    const std::vector<int64_t> shape = {params.batch, params.height, params.width, params.filter_count};
    require(bias.has_shape({params.filter_count}), "QuantizedNhwcConv: B must have one element a filter");
    require(!skip || skip.shape == shape, "QuantizedNhwcConv: skip must have the shape of Y");
    params.x = x.data;
    params.filters = filters.data;
    params.scale = static_cast<const float*>(scale.data);
    params.bias = bias.data;
    params.skip = skip.data;
    params.y = tensors.output(0, shape);
  }
};

}  // namespace sd_ort
