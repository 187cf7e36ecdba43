// Binding of NhwcConv.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(nhwc_conv, NhwcConvParams)

struct NhwcConvBinding : BindingBase<NhwcConvParams, nhwc_conv_cpu> {
  static constexpr const char* kName = "NhwcConv";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT, true}, {Port::kT, true}};  // X, W, B, skip
  static constexpr Port kOutputs[] = {{Port::kT}};                                                 // Y

  // Only explicit `pads` (auto_pad NOTSET), by default 0.
  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.groups = attributes.integer("group", 1);
    params.relu = static_cast<int32_t>(attributes.integer("relu", 0));
    const std::vector<int64_t> strides = attributes.integers("strides", {1, 1});
    const std::vector<int64_t> dilations = attributes.integers("dilations", {1, 1});
    const std::vector<int64_t> pads = attributes.integers("pads", {0, 0, 0, 0});
    require(params.groups > 0 && strides.size() == 2 && dilations.size() == 2 && pads.size() == 4,
            "NhwcConv: group must be positive, strides and dilations two numbers and pads four");
    params.stride_height = strides[0];
    params.stride_width = strides[1];
    params.dilation_height = dilations[0];
    params.dilation_width = dilations[1];
    params.pad_top = pads[0];
    params.pad_left = pads[1];
    params.pad_bottom = pads[2];
    params.pad_right = pads[3];
    for (int64_t step : {strides[0], strides[1], dilations[0], dilations[1]}) {
      require(step > 0, "NhwcConv: strides and dilations must be positive");
    }
    for (int64_t pad : pads) require(pad >= 0, "NhwcConv: pads must not be negative");
    return params;
  }

  static void infer(Shapes&) {}

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), filters = tensors.input(1), bias = tensors.input(2), skip = tensors.input(3);
    require(x.shape.size() == 4, "NhwcConv: X must be (N, H, W, C)");
    params.batch = x.shape[0];
    params.height = x.shape[1];
    params.width = x.shape[2];
    params.channels = x.shape[3];
    require(filters.shape.size() == 4 && filters.shape[3] * params.groups == params.channels &&
                filters.shape[0] % params.groups == 0,
            "NhwcConv: W must be (M, kH, kW, C / group), M a multiple of group");
    params.filter_count = filters.shape[0];
    params.kernel_height = filters.shape[1];
    params.kernel_width = filters.shape[2];
    params.out_height = out_size(params.height + params.pad_top + params.pad_bottom, params.kernel_height,
                                 params.stride_height, params.dilation_height);
    params.out_width = out_size(params.width + params.pad_left + params.pad_right, params.kernel_width,
                                params.stride_width, params.dilation_width);
    const std::vector<int64_t> shape = {params.batch, params.out_height, params.out_width, params.filter_count};
    require(!bias || bias.has_shape({params.filter_count}), "NhwcConv: B must have one element a filter");
    require(!skip || skip.shape == shape, "NhwcConv: skip must have the shape of Y");
    params.x = x.data;
    params.filters = filters.data;
    params.bias = bias.data;
    params.skip = skip.data;
    params.y = tensors.output(0, shape);
  }

 private:
  static int64_t out_size(int64_t padded, int64_t kernel, int64_t stride, int64_t dilation) {
    const int64_t window = (kernel - 1) * dilation + 1;
    require(padded >= window, "NhwcConv: the kernel is larger than the padded image");
    return (padded - window) / stride + 1;
  }
};

}  // namespace sd_ort
