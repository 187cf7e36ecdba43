// QuantizedAttention(QKV; num_heads, scale, quantized_scale) -> quantized: attention of 8-bit elements. Per head it is
// softmax(scale * Q K^T) V of the elements themselves, / quantized_scale in float8 (e4m3fn): who knows the scale s of
// QKV multiplies `scale` by s^2 and divides `quantized_scale` by s. QKV is packed, (B, S, N, 3, H) in float8, quantized
// is (B, S, N * H).
#pragma once

#include "common/op.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

// NMSE of an output of candidates that round the weights to float8 before the product with V: a part of 3e-2 of each
// weight, which is a part of about 3e-2 of the output if the values of the keys do not depend on each other.
constexpr double kFloat8WeightsNmse = 4e-3;

struct QuantizedAttentionParams {
  DType dtype;             // float16, whose numbers include those of float8: that of kernels without float8
  const void* qkv;         // (batch, sequence, heads, 3, head_size)
  Float8Output quantized;  // (batch, sequence, heads * head_size)
  int64_t batch;
  int64_t heads;
  int64_t sequence;
  int64_t head_size;
  float scale;

  int64_t qkv_count() const { return batch * sequence * heads * 3 * head_size; }
  std::string signature() const {
    std::string text = name_of(DType::kFloat8);
    for (int64_t size : {batch, heads, sequence, head_size}) text += "_" + std::to_string(size);
    return text;
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(batch * sequence * heads * head_size);
    return {{quantized.data, count, DType::kFloat8, kFloat8WeightsNmse}};
  }

  // The same attention of `elements`, QKV in `type`.
  MultiHeadAttentionParams of(DType type, const void* elements) const {
    MultiHeadAttentionParams attention{};
    const int64_t row = heads * 3 * head_size, bytes = head_size * static_cast<int64_t>(size_of(type));
    const auto view = [&](int64_t index) {
      return HeadsView{static_cast<const char*>(elements) + index * bytes, sequence * row, row, 3 * head_size};
    };
    attention.dtype = type;
    attention.query = view(0);
    attention.key = view(1);
    attention.value = view(2);
    attention.batch = batch;
    attention.heads = attention.kv_heads = heads;
    attention.sequence = attention.kv_sequence = sequence;
    attention.head_size = head_size;
    attention.scale = scale;
    attention.quantized = quantized;
    return attention;
  }
};

// Writes the elements of QKV in float16 to `to`.
const char* dequantize_qkv_launch(const QuantizedAttentionParams& params, void* to, void* stream);

}  // namespace sd_ort
