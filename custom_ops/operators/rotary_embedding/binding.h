// Binding of RotaryEmbedding.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/rotary_embedding/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(rotary_embedding, RotaryEmbeddingParams)

struct RotaryEmbeddingBinding : BindingBase<RotaryEmbeddingParams, rotary_embedding_cpu> {
  static constexpr const char* kName = "RotaryEmbedding";
  // X, position_ids, cos, sin
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kAny}, {Port::kT}, {Port::kT}};
  static constexpr Port kOutputs[] = {{Port::kT}};  // Y

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.heads = attributes.required_integer("num_heads");
    params.interleaved = static_cast<int32_t>(attributes.integer("interleaved", 0));
    return params;
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), positions = tensors.input(1), cos = tensors.input(2), sin = tensors.input(3);
    require(positions.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 && positions.has_shape({1}),
            "RotaryEmbedding: position_ids must be one int64");
    require(x.shape.size() == 3 && cos.shape.size() == 2 && sin.shape == cos.shape && cos.shape[1] > 0,
            "RotaryEmbedding: X must be (B, S, N * D), cos and sin (L, D / 2)");
    params.pairs = cos.shape[1];
    require(x.shape[2] == params.heads * 2 * params.pairs,
            "RotaryEmbedding: cos and sin must be half as wide as a head of X");
    require(cos.shape[0] >= x.shape[1], "RotaryEmbedding: cos and sin must have a row for each token");
    params.batch = x.shape[0];
    params.length = x.shape[1];
    params.table_rows = cos.shape[0];
    params.x = x.data;
    params.positions = static_cast<const int64_t*>(positions.data);
    params.cos = cos.data;
    params.sin = sin.data;
    params.y = tensors.output(0, x.shape);
  }
};

}  // namespace sd_ort
