// Binding of SkipGroupNorm. Its kernels are group_norm's, with `skip` and `sum` in Params.
#pragma once

#include "operators/group_norm/binding.h"

namespace sd_ort {

struct SkipGroupNormBinding : BindingBase<GroupNormParams, group_norm_cpu> {
  static constexpr const char* kName = "SkipGroupNorm";
  // X, gamma, beta, skip, bias
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kAny}, {Port::kAny}, {Port::kT}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {
      {Port::kT, true}, {Port::kT, true}, {Port::kFloat8, true}};  // Y, S = X + skip + bias, quantized
  static constexpr bool kMutableAliasX = true;  // all kernels have their statistics before an element of Y is written

  static Params attributes(const Attributes& attributes) { return group_norm_attributes(attributes); }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    shapes.set_output(shapes.input(0));
  }

  static void bind(Tensors& tensors, Params& params) {
    bind_group_norm(tensors, params, 2);
    const Tensor x = tensors.input(0), skip = tensors.input(3), bias = tensors.input(4);
    params.skip_broadcast = skip.shape != x.shape;
    require(!params.skip_broadcast || is_per_channel(skip, params),
            "SkipGroupNorm: skip must have the shape of X, or be one number per sample and channel");
    require(!bias || bias.has_shape({params.channels}), "SkipGroupNorm: bias must have one element a channel");
    params.skip = skip.data;
    params.bias = bias.data;
    params.sum = tensors.output(1, x.shape);
  }

 private:
  // (N, C), or (N, 1, 1, C) beside channels-last X, or (N, C, 1, 1) beside channels-first X.
  static bool is_per_channel(const Tensor& skip, const Params& params) {
    if (skip.shape.size() < 2 || skip.shape.front() != params.batch) return false;
    if (skip.size() != params.batch * params.channels) return false;
    return (skip.shape.size() == 2 || !params.channels_last ? skip.shape[1] : skip.shape.back()) == params.channels;
  }
};

}  // namespace sd_ort
