// Binding of SwiGlu.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/swiglu/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(swiglu, SwiGluParams)

struct SwiGluBinding : BindingBase<SwiGluParams, swiglu_cpu> {
  static constexpr const char* kName = "SwiGlu";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT, true}};              // gate, up
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kFloat8, true}};  // Y, quantized

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    Dim& last = dims.back();
    if (!shapes.has(1)) last = last.known() ? Dim{last.value / 2, ""} : Dim{};  // half of a symbol has no name
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor gate = tensors.input(0), up = tensors.input(1);
    require(!gate.shape.empty(), "SwiGlu: gate must have a last axis");
    require(!up || up.shape == gate.shape, "SwiGlu: up must have the shape of gate");
    require(up || gate.shape.back() % 2 == 0, "SwiGlu: the last axis must be even without up");
    params.stride = gate.shape.back();
    params.columns = up ? params.stride : params.stride / 2;
    params.rows = gate.rows();
    params.gate = gate.data;
    params.up = up ? up.data : static_cast<const char*>(gate.data) + params.columns * size_of(gate.dtype());
    std::vector<int64_t> shape = gate.shape;
    shape.back() = params.columns;
    params.y = tensors.output(0, shape);
    params.quantized = tensors.float8_output(1, shape, params.quantized.scale);
  }
};

}  // namespace sd_ort
