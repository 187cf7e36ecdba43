// Binding of MultiHeadAttention.
#pragma once

#include <cmath>

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(multi_head_attention, MultiHeadAttentionParams)

struct MultiHeadAttentionBinding : BindingBase<MultiHeadAttentionParams, multi_head_attention_cpu> {
  static constexpr const char* kName = "MultiHeadAttention";
  // query, key, value, bias, key_padding_mask, attention_bias
  static constexpr Port kInputs[] = {{Port::kT},       {Port::kT, true},   {Port::kT, true},
                                     {Port::kT, true}, {Port::kAny, true}, {Port::kT, true}};
  static constexpr Port kOutputs[] = {{Port::kT, true}, {Port::kFloat8, true}};  // output, quantized

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.heads = attributes.required_integer("num_heads");
    require(params.heads > 0, "MultiHeadAttention: num_heads must be positive");
    params.kv_heads = attributes.integer("kv_num_heads", params.heads);
    require(params.kv_heads > 0 && params.heads % params.kv_heads == 0,
            "MultiHeadAttention: kv_num_heads must divide num_heads");
    params.scale = attributes.real("scale", 0.f);
    params.quantized.scale = attributes.real("quantized_scale", 0.f);
    params.causal = attributes.integer("unidirectional", 0) != 0;
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    if (dims.size() == 5) {
      const bool known = dims[2].known() && dims[4].known();
      dims = {dims[0], dims[1], known ? Dim{dims[2].value * dims[4].value, ""} : Dim{}};
    }
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor query = tensors.input(0), key = tensors.input(1), value = tensors.input(2);
    require(!tensors.input(3), "MultiHeadAttention: the input bias is not supported; add it to query, key and value");
    require(!tensors.input(4), "MultiHeadAttention: key_padding_mask is not supported; use attention_bias");
    if (query.shape.size() == 5) {
      require(
          !key && !value && query.shape[2] == params.heads && query.shape[3] == 3 && params.kv_heads == params.heads,
          "MultiHeadAttention: a packed query is (batch, sequence, num_heads, 3, head_size), without key and value");
      params.head_size = query.shape[4];
      params.query = packed(query, params, 0);
      params.key = packed(query, params, 1);
      params.value = packed(query, params, 2);
      params.kv_sequence = query.shape[1];
    } else {
      require(query.shape.size() == 3 && query.shape[2] % params.heads == 0,
              "MultiHeadAttention: query must be (batch, sequence, num_heads * head_size)");
      params.head_size = query.shape[2] / params.heads;
      params.query = separate(query, params);
      if (key.shape.size() == 5) {
        require(!value && key.has_shape({query.shape[0], key.shape[1], params.kv_heads, 2, params.head_size}),
                "MultiHeadAttention: a packed key is (batch, sequence, kv_num_heads, 2, head_size), without value");
        params.key = packed(key, params, 0);
        params.value = packed(key, params, 1);
      } else {
        require(key.shape.size() == 3 && value.shape == key.shape &&
                    key.has_shape({query.shape[0], key.shape[1], params.kv_heads * params.head_size}),
                "MultiHeadAttention: key and value must be (batch, kv_sequence, kv_num_heads * head_size)");
        params.key = separate(key, params);
        params.value = separate(value, params);
      }
      params.kv_sequence = key.shape[1];
    }
    params.batch = query.shape[0];
    params.sequence = query.shape[1];
    if (params.scale == 0.f) params.scale = 1.f / std::sqrt(static_cast<float>(params.head_size));
    bind_attention_bias(tensors.input(5), params);
    const std::vector<int64_t> shape = {params.batch, params.sequence, params.heads * params.head_size};
    params.output = tensors.output(0, shape);
    params.quantized = tensors.float8_output(1, shape, params.quantized.scale);
  }

 private:
  static HeadsView separate(const Tensor& tensor, const Params& params) {
    if (tensor.size() == 0) return {tensor.data, 0, 0, 0};
    return {tensor.data, tensor.shape[1] * tensor.shape[2], tensor.shape[2], params.head_size};
  }

  // Slice `part` of a packed tensor (batch, sequence, heads or kv_heads, parts, head_size).
  static HeadsView packed(const Tensor& tensor, const Params& params, int64_t part) {
    if (tensor.size() == 0) return {tensor.data, 0, 0, 0};
    const int64_t parts = tensor.shape[3], row = tensor.shape[2] * parts * params.head_size;
    const int64_t offset = part * params.head_size * static_cast<int64_t>(size_of(tensor.dtype()));
    return {static_cast<const char*>(tensor.data) + offset, tensor.shape[1] * row, row, parts * params.head_size};
  }

  static void bind_attention_bias(const Tensor& bias, Params& params) {
    params.attention_bias = bias.data;
    if (!bias) return;
    const auto& shape = bias.shape;
    require(shape.size() == 4 && (shape[0] == params.batch || shape[0] == 1) &&
                (shape[1] == params.heads || shape[1] == 1) && shape[2] == params.sequence &&
                shape[3] == params.kv_sequence,
            "MultiHeadAttention: attention_bias must be (batch or 1, num_heads or 1, sequence, kv_sequence)");
    const int64_t plane = params.sequence * params.kv_sequence;
    params.bias_batch_stride = shape[0] == 1 ? 0 : shape[1] * plane;
    params.bias_head_stride = shape[1] == 1 ? 0 : plane;
  }
};

}  // namespace sd_ort
