// Binding of AdaptiveNorm.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/adaptive_norm/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(adaptive_norm, AdaptiveNormParams)

struct AdaptiveNormBinding : BindingBase<AdaptiveNormParams, adaptive_norm_cpu> {
  static constexpr const char* kName = "AdaptiveNorm";
  // X, scale, shift, gate, skip
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT, true}, {Port::kT, true}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kT, true}, {Port::kFloat8, true}};  // Y, sum, quantized

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.epsilon = attributes.real("epsilon", 1e-5f);
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    params.rms = static_cast<int32_t>(attributes.integer("rms", 0));
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    shapes.set_output(shapes.input(0));
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), scale = tensors.input(1), shift = tensors.input(2);
    const Tensor gate = tensors.input(3), skip = tensors.input(4);
    require(!x.shape.empty() && x.shape.back() > 0, "AdaptiveNorm: the last axis of X must not be empty");
    require(!shift || shift.shape == scale.shape, "AdaptiveNorm: shift must have the shape of scale");
    require(!skip || skip.shape == x.shape, "AdaptiveNorm: skip must have the shape of X");
    params.rows = x.rows();
    params.channels = x.shape.back();
    params.scale_rows = rows_per_vector(x, scale);
    params.gate_rows = gate ? rows_per_vector(x, gate) : 1;
    params.x = x.data;
    params.scale = scale.data;
    params.shift = shift.data;
    params.gate = gate.data;
    params.skip = skip.data;
    params.y = tensors.output(0, x.shape);
    params.sum = tensors.output(1, x.shape);
    params.quantized = tensors.float8_output(2, x.shape, params.quantized.scale);
  }

 private:
  // Returns the rows of x that a row of (C) or (B, 1, ..., C) serves.
  static int64_t rows_per_vector(const Tensor& x, const Tensor& vectors) {
    const int64_t rows = std::max<int64_t>(x.rows(), 1);
    if (vectors.has_shape({x.shape.back()})) return rows;
    std::vector<int64_t> expected(x.shape.size(), 1);
    expected.back() = x.shape.back();
    if (vectors.shape == expected) return rows;
    expected.front() = x.shape.front();
    require(x.shape.size() > 1 && vectors.shape == expected,
            "AdaptiveNorm: scale, shift and gate must be (C), or (B, 1, ..., C) for X (B, ..., C)");
    return x.rows() == 0 ? 1 : x.rows() / x.shape.front();
  }
};

}  // namespace sd_ort
