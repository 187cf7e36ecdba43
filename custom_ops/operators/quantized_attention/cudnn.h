// QuantizedAttention as a cuDNN graph that runs as one kernel (Hopper and later). Included only by candidates.cc.
#pragma once

#include "common/cudnn.h"
#include "common/tuner.h"
#include "operators/multi_head_attention/cudnn.h"
#include "operators/quantized_attention/op.h"

namespace sd_ort {

class CudnnQuantizedAttention {
 public:
  explicit CudnnQuantizedAttention(const QuantizedAttentionParams& p) : p_(p) {}

  bool supports(int index) const {
    return p_.scale > 0 && p_.qkv_count() > 0 && p_.head_size % 16 == 0 && are_aligned<16>(p_.qkv, p_.quantized.data) &&
           device_number(1.f) != nullptr && cudnn().supports(key(), build(), index);
  }
  // The two largest magnitudes that the kernel writes come first.
  size_t workspace_bytes(int index) const { return kMagnitudeBytes + cudnn().workspace_bytes(key(), build(), index); }

  const char* run(int index, void* workspace, void* stream) const {
    float* const magnitudes = static_cast<float*>(workspace);
    const MultiHeadAttentionParams attention = p_.of(DType::kFloat8, p_.qkv);
    return cudnn().run(key(), build(), index,
                       {{kQuery, attention.query.data},
                        {kKey, attention.key.data},
                        {kValue, attention.value.data},
                        {kOutput, p_.quantized.data},
                        {kScale, &p_.scale},
                        {kOne, device_number(1.f)},
                        {kWeightFactor, device_number(kLargestWeight)},
                        {kWeightScale, device_number(1.f / kLargestWeight)},
                        {kOutputFactor, device_number(1.f / p_.quantized.scale)},
                        {kLargestWeightSeen, magnitudes},
                        {kLargestOutputSeen, magnitudes + 1}},
                       static_cast<char*>(workspace) + kMagnitudeBytes, stream);
  }

 private:
  using Graph = Cudnn::Graph;
  static constexpr int64_t kQuery = 1, kKey = 2, kValue = 3, kOutput = 4, kScale = 5, kOne = 6, kWeightFactor = 7,
                           kWeightScale = 8, kOutputFactor = 9, kLargestWeightSeen = 10, kLargestOutputSeen = 11;
  static constexpr float kLargestWeight = 256.f;  // weights up to 1 in float8, a power of two below 448
  static constexpr size_t kMagnitudeBytes = 256;

  static Cudnn& cudnn() { return Cudnn::instance(); }

  std::string key() const { return "quantized_attention_" + p_.signature(); }

  // The operations that cuDNN recognizes as flash attention in float8: factors are numbers in device memory, but for the
  // scale of the scores, and each product ends in factors of both of its operands.
  Cudnn::Build build() const {
    return [this](Graph& graph) {
      const MultiHeadAttentionParams a = p_.of(DType::kFloat8, p_.qkv);
      const int64_t b = a.batch, n = a.heads, s = a.sequence, h = a.head_size;
      const Graph::Sizes scores = {b, n, s, s}, scores_strides = {n * s * s, s * s, s, 1}, one = {1, 1, 1, 1};
      const Graph::Sizes heads = {b, n, s, h}, output_strides = {s * n * h, h, n * h, 1};
      const auto strides = [](const HeadsView& view) {
        return Graph::Sizes{view.batch_stride, view.head_stride, view.row_stride, 1};
      };
      const auto number = [&](int64_t id) -> const Cudnn::Descriptor& {
        return graph.tensor(id, DType::kFloat32, one, one);
      };
      const auto times = [&](const Cudnn::Descriptor& x, const Cudnn::Descriptor& factor, const Graph::Sizes& sizes,
                             const Graph::Sizes& x_strides, DType type = DType::kFloat32) -> const Cudnn::Descriptor& {
        const Cudnn::Descriptor& y = graph.intermediate(sizes, x_strides, type);
        graph.pointwise(Graph::kMultiply, x, &factor, y);
        return y;
      };
      const Cudnn::Descriptor& query = graph.tensor(kQuery, DType::kFloat8, heads, strides(a.query));
      const Cudnn::Descriptor& key = graph.tensor(kKey, DType::kFloat8, {b, n, h, s},
                                                  {a.key.batch_stride, a.key.head_stride, 1, a.key.row_stride});
      const Cudnn::Descriptor& value = graph.tensor(kValue, DType::kFloat8, heads, strides(a.value));
      const Cudnn::Descriptor& output = graph.tensor(kOutput, DType::kFloat8, heads, output_strides);
      const Cudnn::Descriptor& scale = graph.tensor(kScale, DType::kFloat32, one, one, Graph::Place::kHost);
      const Cudnn::Descriptor &unit = number(kOne), &weight_factor = number(kWeightFactor),
                              &weight_scale = number(kWeightScale), &output_factor = number(kOutputFactor);

      const Cudnn::Descriptor& raw = graph.intermediate(scores, scores_strides);
      graph.matmul(query, key, raw);
      const Cudnn::Descriptor& scaled = times(raw, scale, scores, scores_strides);
      const Cudnn::Descriptor& of_query = times(scaled, unit, scores, scores_strides);
      const Cudnn::Descriptor& of_key = times(of_query, unit, scores, scores_strides);
      const Cudnn::Descriptor& weights = add_cudnn_softmax(graph, of_key, b, n, s, s, DType::kFloat32);
      graph.reduction(Graph::kLargestMagnitude, weights, number(kLargestWeightSeen));
      const Cudnn::Descriptor& rounded = times(weights, weight_factor, scores, scores_strides, DType::kFloat8);
      const Cudnn::Descriptor& sums = graph.intermediate(heads, output_strides);
      graph.matmul(rounded, value, sums);
      const Cudnn::Descriptor& of_weights = times(sums, weight_scale, heads, output_strides);
      const Cudnn::Descriptor& of_value = times(of_weights, unit, heads, output_strides);
      graph.pointwise(Graph::kMultiply, of_value, &output_factor, output);
      graph.reduction(Graph::kLargestMagnitude, of_value, number(kLargestOutputSeen));
    };
  }

  const QuantizedAttentionParams& p_;
};

}  // namespace sd_ort
