// Binding of Bfloat16Attention, with the first three inputs of MultiHeadAttention.
#pragma once

#include "operators/bfloat16_attention/op.h"
#include "operators/multi_head_attention/binding.h"

namespace sd_ort {

SD_ORT_BFLOAT16_KERNEL(bfloat16_attention, MultiHeadAttentionParams)

struct Bfloat16AttentionBinding {
  using Params = MultiHeadAttentionParams;
  static constexpr const char* kName = "Bfloat16Attention";
  static constexpr bool kBFloat16 = true;
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT, true}, {Port::kT, true}};  // query, key, value
  static constexpr Port kOutputs[] = {{Port::kT}};

  static Params attributes(const Attributes& attributes) { return MultiHeadAttentionBinding::attributes(attributes); }
  static void infer(Shapes& shapes) { MultiHeadAttentionBinding::infer(shapes); }
  static void bind(Tensors& tensors, Params& params) {
    require(params.dtype != DType::kFloat16, "Bfloat16Attention: query must be float32 or bfloat16");
    require(!params.causal, "Bfloat16Attention: unidirectional is not supported");
    MultiHeadAttentionBinding::bind(tensors, params);
  }
  static void cpu(const Params& params, const Parallel& parallel) { bfloat16_attention_cpu(params, parallel); }
};

}  // namespace sd_ort
