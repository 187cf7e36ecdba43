// MultiHeadAttention as a cuDNN graph that runs as one kernel and reads packed inputs in place. Included only by
// candidates.cc.
#pragma once

#include "common/cudnn.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

class CudnnAttention {
 public:
  explicit CudnnAttention(const MultiHeadAttentionParams& p) : p_(p) {}

  bool supports(int index) const {
    // cuDNN applies the scale after the maximum, which a negative scale would turn into a minimum.
    return p_.attention_bias == nullptr && !p_.causal && p_.scale > 0 && p_.batch > 0 && p_.heads > 0 &&
           p_.sequence > 0 && p_.head_size > 0 && multi_head_attention_supports(p_, MultiHeadAttentionKernel::kLarge) &&
           cudnn().supports(key(), build(), index);
  }
  size_t workspace_bytes(int index) const { return cudnn().workspace_bytes(key(), build(), index); }
  const char* run(int index, void* workspace, void* stream) const {
    return cudnn().run(key(), build(), index,
                       {{kQuery, p_.query.data},
                        {kKey, p_.key.data},
                        {kValue, p_.value.data},
                        {kOutput, p_.output},
                        {kScale, &p_.scale}},
                       workspace, stream);
  }

 private:
  using Graph = Cudnn::Graph;
  static constexpr int64_t kQuery = 1, kKey = 2, kValue = 3, kOutput = 4, kScale = 5;

  static Cudnn& cudnn() { return Cudnn::instance(); }

  std::string key() const {
    std::string text = "attention_" + p_.signature();
    for (const HeadsView& view : {p_.query, p_.key, p_.value}) {
      for (int64_t stride : {view.batch_stride, view.head_stride, view.row_stride})
        text += "_" + std::to_string(stride);
    }
    return text;
  }

  // The operations that cuDNN recognizes as flash attention, including the unused logarithm of the sums. Fewer heads of
  // key and value are broadcast over the query heads of a group, or no plan is proposed.
  Cudnn::Build build() const {
    return [this](Graph& graph) {
      const int64_t b = p_.batch, n = p_.heads, m = p_.kv_heads, s = p_.sequence, l = p_.kv_sequence, h = p_.head_size;
      const HeadsView out = {nullptr, s * n * h, n * h, h};
      const Graph::Sizes scores = {b, n, s, l}, scores_strides = {n * s * l, s * l, l, 1};
      const Graph::Sizes rows = {b, n, s, 1}, rows_strides = {n * s, s, 1, 1}, one = {1, 1, 1, 1};
      const auto score_tensor = [&](DType type = DType::kFloat32) -> const Cudnn::Descriptor& {
        return graph.intermediate(scores, scores_strides, type);
      };
      const auto row_tensor = [&]() -> const Cudnn::Descriptor& { return graph.intermediate(rows, rows_strides); };
      const Cudnn::Descriptor& query = graph.tensor(kQuery, p_.dtype, {b, n, s, h}, strides(p_.query));
      const Cudnn::Descriptor& key =
          graph.tensor(kKey, p_.dtype, {b, m, h, l}, {p_.key.batch_stride, p_.key.head_stride, 1, p_.key.row_stride});
      const Cudnn::Descriptor& value = graph.tensor(kValue, p_.dtype, {b, m, l, h}, strides(p_.value));
      const Cudnn::Descriptor& output = graph.tensor(kOutput, p_.dtype, {b, n, s, h}, strides(out));
      const Cudnn::Descriptor& scale = graph.tensor(kScale, DType::kFloat32, one, one, Graph::Place::kHost);

      const Cudnn::Descriptor &raw = score_tensor(), &scaled = score_tensor(), &shifted = score_tensor(),
                              &powers = score_tensor();
      const Cudnn::Descriptor& weights = score_tensor(p_.dtype);
      const Cudnn::Descriptor &largest = row_tensor(), &sums = row_tensor(), &logarithms = row_tensor(),
                              &statistics = row_tensor();
      graph.matmul(query, key, raw);
      graph.pointwise(Graph::kMultiply, raw, &scale, scaled);
      graph.reduction(Graph::kMaximum, scaled, largest);
      graph.pointwise(Graph::kSubtract, scaled, &largest, shifted);
      graph.pointwise(Graph::kExp, shifted, nullptr, powers);
      graph.reduction(Graph::kSum, powers, sums);
      graph.pointwise(Graph::kLog, sums, nullptr, logarithms);
      graph.pointwise(Graph::kAdd, largest, &logarithms, statistics);
      graph.pointwise(Graph::kDivide, powers, &sums, weights);
      graph.matmul(weights, value, output);
    };
  }

  // Strides of (batch, heads, rows, head size).
  static Graph::Sizes strides(const HeadsView& view) {
    return {view.batch_stride, view.head_stride, view.row_stride, 1};
  }

  const MultiHeadAttentionParams& p_;
};

}  // namespace sd_ort
