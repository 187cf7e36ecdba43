// Binding of GroupNorm, and the parts that the binding of SkipGroupNorm shares.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/group_norm/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(group_norm, GroupNormParams)

inline GroupNormParams group_norm_attributes(const Attributes& attributes) {
  GroupNormParams params{};
  params.groups = attributes.required_integer("groups");
  params.activation = static_cast<int32_t>(attributes.required_integer("activation"));
  params.channels_last = static_cast<int32_t>(attributes.integer("channels_last", 1));
  params.epsilon = attributes.real("epsilon", 1e-5f);
  params.quantized.scale = attributes.real("quantized_scale", 0.f);
  require(params.groups > 0, "GroupNorm: groups must be positive");
  require(params.activation == 0 || params.activation == 1, "GroupNorm: activation must be 0 (none) or 1 (SiLU)");
  return params;
}

// Binds the inputs X, gamma, beta and the outputs Y and, at index `quantized`, Y in float8.
inline void bind_group_norm(Tensors& tensors, GroupNormParams& params, size_t quantized) {
  const Tensor x = tensors.input(0), gamma = tensors.input(1), beta = tensors.input(2);
  require(x.shape.size() >= 3, "GroupNorm: X must have a batch, a channel and spatial axes");
  params.batch = x.shape.front();
  params.channels = params.channels_last ? x.shape.back() : x.shape[1];
  require(params.channels > 0 && params.channels % params.groups == 0,
          "GroupNorm: groups must divide the number of channels");
  params.spatial = x.size() == 0 ? 0 : x.size() / params.batch / params.channels;
  require(gamma.has_shape({params.channels}) && beta.has_shape({params.channels}),
          "GroupNorm: gamma and beta must have one element a channel");
  params.affine_dtype = gamma.dtype();
  require(beta.dtype() == params.affine_dtype &&
              (params.affine_dtype == DType::kFloat32 || params.affine_dtype == params.dtype),
          "GroupNorm: gamma and beta must both be float32 or both have the type of X");
  params.x = x.data;
  params.gamma = gamma.data;
  params.beta = beta.data;
  params.y = tensors.output(0, x.shape);
  params.quantized = tensors.float8_output(quantized, x.shape, params.quantized.scale);
}

struct GroupNormBinding : BindingBase<GroupNormParams, group_norm_cpu> {
  static constexpr const char* kName = "GroupNorm";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kAny}, {Port::kAny}};    // X, gamma, beta
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kFloat8, true}};  // Y, quantized
  static constexpr bool kMutableAliasX = true;  // all kernels have their statistics before an element of Y is written

  static Params attributes(const Attributes& attributes) { return group_norm_attributes(attributes); }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    shapes.set_output(shapes.input(0));
  }

  static void bind(Tensors& tensors, Params& params) { bind_group_norm(tensors, params, 1); }
};

}  // namespace sd_ort
