// Binding of SkipLayerNormalization.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/skip_layer_norm/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(skip_layer_norm, SkipLayerNormParams)

struct SkipLayerNormBinding : BindingBase<SkipLayerNormParams, skip_layer_norm_cpu> {
  static constexpr const char* kName = "SkipLayerNormalization";
  // input, skip, gamma, beta, bias
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT}, {Port::kT, true}, {Port::kT, true}};
  // output, mean, inv_std_var, input_skip_bias_sum, quantized
  static constexpr Port kOutputs[] = {
      {Port::kT, true}, {Port::kT, true}, {Port::kT, true}, {Port::kT, true}, {Port::kFloat8, true}};

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.epsilon = attributes.real("epsilon", 1e-12f);
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    shapes.set_output(shapes.input(0));
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), skip = tensors.input(1), gamma = tensors.input(2);
    const Tensor beta = tensors.input(3), bias = tensors.input(4);
    require(x.shape.size() >= 2, "SkipLayerNormalization: input must have at least two axes");
    params.channels = x.shape.back();
    require(params.channels > 0, "SkipLayerNormalization: the last axis of input must not be empty");
    params.rows = x.size() / params.channels;
    params.skip_rows = skip.size() / params.channels;
    require(broadcasts(skip, x),
            "SkipLayerNormalization: skip must have the shape of input, its batch axis 1 or absent, or be one row");
    require(gamma.has_shape({params.channels}) && (!beta || beta.has_shape({params.channels})) &&
                (!bias || bias.has_shape({params.channels})),
            "SkipLayerNormalization: gamma, beta and bias must have as many elements as the last axis of input");
    params.x = x.data;
    params.skip = skip.data;
    params.gamma = gamma.data;
    params.beta = beta.data;
    params.bias = bias.data;
    params.y = tensors.output(0, x.shape);
    std::vector<int64_t> statistics = x.shape;
    statistics.back() = 1;
    require(tensors.output(1, statistics) == nullptr && tensors.output(2, statistics) == nullptr,
            "SkipLayerNormalization: the outputs mean and inv_std_var are not computed");
    params.sum = tensors.output(3, x.shape);
    params.quantized = tensors.float8_output(4, x.shape, params.quantized.scale);
  }

 private:
  static bool broadcasts(const Tensor& skip, const Tensor& x) {
    if (skip.shape == x.shape || skip.has_shape({x.shape.back()})) return true;
    if (x.shape.size() != 3) return false;
    return skip.has_shape({1, x.shape[1], x.shape[2]}) || skip.has_shape({x.shape[1], x.shape[2]});
  }
};

}  // namespace sd_ort
