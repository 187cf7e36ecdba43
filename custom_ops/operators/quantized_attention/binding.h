// Binding of QuantizedAttention.
#pragma once

#include <vector>

#include "common/float8.h"
#include "operators/multi_head_attention/binding.h"
#include "operators/quantized_attention/op.h"

namespace sd_ort {

struct QuantizedAttentionBinding {
  using Params = QuantizedAttentionParams;
  static constexpr const char* kName = "QuantizedAttention";
  static constexpr Port kInputs[] = {{Port::kFloat8}};   // QKV
  static constexpr Port kOutputs[] = {{Port::kFloat8}};  // quantized
  static constexpr DType kDtype = DType::kFloat16;       // no input has type T

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.heads = attributes.required_integer("num_heads");
    require(params.heads > 0, "QuantizedAttention: num_heads must be positive");
    params.scale = attributes.real("scale", 0.f);
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    return params;
  }

  static void infer(Shapes&) {}

  static void bind(Tensors& tensors, Params& params) {
    const Tensor qkv = tensors.input(0);
    require(qkv.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN && qkv.shape.size() == 5 &&
                qkv.shape[2] == params.heads && qkv.shape[3] == 3,
            "QuantizedAttention: QKV must be (batch, sequence, num_heads, 3, head_size) in float8e4m3fn");
    params.qkv = qkv.data;
    params.batch = qkv.shape[0];
    params.sequence = qkv.shape[1];
    params.head_size = qkv.shape[4];
    params.quantized = tensors.float8_output(0, {params.batch, params.sequence, params.heads * params.head_size},
                                             params.quantized.scale);
  }

  // Attention of the elements in float32.
  static void cpu(const Params& p, const Parallel& parallel) {
    std::vector<float> elements(p.qkv_count());
    const uint8_t* const bits = static_cast<const uint8_t*>(p.qkv);
    const int64_t rows = p.batch * p.sequence, columns = rows == 0 ? 0 : p.qkv_count() / rows;
    parallel(rows, [&](size_t row) {
      for (int64_t i = row * columns; i < static_cast<int64_t>(row + 1) * columns; ++i) {
        elements[i] = float8_to_float(bits[i]);
      }
    });
    multi_head_attention_cpu(p.of(DType::kFloat32, elements.data()), parallel);
  }
};

}  // namespace sd_ort
