// Binding of RotaryQkv.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/rotary_qkv/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(rotary_qkv, RotaryQkvParams)

struct RotaryQkvBinding : BindingBase<RotaryQkvParams, rotary_qkv_cpu> {
  static constexpr const char* kName = "RotaryQkv";
  // qkv, other, q_scale, k_scale, other_q_scale, other_k_scale, cos, sin
  static constexpr Port kInputs[] = {{Port::kT},       {Port::kT, true}, {Port::kT, true}, {Port::kT, true},
                                     {Port::kT, true}, {Port::kT, true}, {Port::kT, true}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {{Port::kT}};
  static constexpr bool kMutableAliasX = true;  // with one stream; two have a larger output

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.epsilon = attributes.real("epsilon", 1e-6f);
    params.interleaved = static_cast<int32_t>(attributes.integer("interleaved", 0));
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    if (shapes.has(1)) {
      const Dim other = shapes.input(1)[1];
      dims[1] = dims[1].known() && other.known() ? Dim{dims[1].value + other.value, ""} : Dim{};
    }
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor qkv = tensors.input(0), other = tensors.input(1), cos = tensors.input(6), sin = tensors.input(7);
    const auto& shape = qkv.shape;
    require(shape.size() == 5 && shape[3] == 3 && shape[4] > 0 && shape[4] % 2 == 0,
            "RotaryQkv: qkv must be (B, S, N, 3, H) with an even H");
    require(!other ||
                (other.shape.size() == 5 && other.has_shape({shape[0], other.shape[1], shape[2], shape[3], shape[4]})),
            "RotaryQkv: other must be (B, T, N, 3, H)");
    params.batch = shape[0];
    params.heads = shape[2];
    params.pairs = shape[4] / 2;
    params.first = stream(qkv, tensors.input(2), tensors.input(3), shape[4]);
    params.second = stream(other, tensors.input(4), tensors.input(5), shape[4]);
    require(!cos == !sin && (!cos || (cos.has_shape({params.length(), params.pairs}) && sin.shape == cos.shape)),
            "RotaryQkv: cos and sin must be (S + T, H / 2)");
    params.cos = cos.data;
    params.sin = sin.data;
    params.y = tensors.output(0, {shape[0], params.length(), shape[2], 3, shape[4]});
  }

 private:
  static RotaryQkvStream stream(const Tensor& qkv, const Tensor& q_scale, const Tensor& k_scale, int64_t size) {
    require(!q_scale == !k_scale && (!q_scale || (q_scale.has_shape({size}) && k_scale.has_shape({size}))),
            "RotaryQkv: scales must be (H), for query and key or for neither");
    return {qkv.data, q_scale.data, k_scale.data, qkv ? qkv.shape[1] : 0};
  }
};

}  // namespace sd_ort
