// MultiHeadAttention as a cuDNN graph that runs as one kernel and reads packed inputs in place. Included only by
// candidates.cc, and for its softmax by QuantizedAttention.
#pragma once

#include "common/cudnn.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

// Adds the softmax along the last axis of scores (batch, heads, rows, keys) and returns the weights in `type`: the
// operations that cuDNN recognizes as those of flash attention, including the unused logarithm of the sums.
inline const Cudnn::Descriptor& add_cudnn_softmax(Cudnn::Graph& graph, const Cudnn::Descriptor& scores, int64_t batch,
                                                  int64_t heads, int64_t rows, int64_t keys, DType type) {
  using Graph = Cudnn::Graph;
  const Graph::Sizes sizes = {batch, heads, rows, keys}, strides = {heads * rows * keys, rows * keys, keys, 1};
  const auto row_tensor = [&]() -> const Cudnn::Descriptor& {
    return graph.intermediate({batch, heads, rows, 1}, {heads * rows, rows, 1, 1});
  };
  const Cudnn::Descriptor &shifted = graph.intermediate(sizes, strides), &powers = graph.intermediate(sizes, strides);
  const Cudnn::Descriptor& weights = graph.intermediate(sizes, strides, type);
  const Cudnn::Descriptor &largest = row_tensor(), &sums = row_tensor(), &logarithms = row_tensor(),
                          &statistics = row_tensor();
  graph.reduction(Graph::kMaximum, scores, largest);
  graph.pointwise(Graph::kSubtract, scores, &largest, shifted);
  graph.pointwise(Graph::kExp, shifted, nullptr, powers);
  graph.reduction(Graph::kSum, powers, sums);
  graph.pointwise(Graph::kLog, sums, nullptr, logarithms);
  graph.pointwise(Graph::kAdd, largest, &logarithms, statistics);
  graph.pointwise(Graph::kDivide, powers, &sums, weights);
  return weights;
}

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

  // Fewer heads of key and value are broadcast over the query heads of a group, or no plan is proposed.
  Cudnn::Build build() const {
    return [this](Graph& graph) {
      const int64_t b = p_.batch, n = p_.heads, m = p_.kv_heads, s = p_.sequence, l = p_.kv_sequence, h = p_.head_size;
      const HeadsView out = {nullptr, s * n * h, n * h, h};
      const Graph::Sizes scores = {b, n, s, l}, scores_strides = {n * s * l, s * l, l, 1}, one = {1, 1, 1, 1};
      const Cudnn::Descriptor& query = graph.tensor(kQuery, p_.dtype, {b, n, s, h}, strides(p_.query));
      const Cudnn::Descriptor& key =
          graph.tensor(kKey, p_.dtype, {b, m, h, l}, {p_.key.batch_stride, p_.key.head_stride, 1, p_.key.row_stride});
      const Cudnn::Descriptor& value = graph.tensor(kValue, p_.dtype, {b, m, l, h}, strides(p_.value));
      const Cudnn::Descriptor& output = graph.tensor(kOutput, p_.dtype, {b, n, s, h}, strides(out));
      const Cudnn::Descriptor& scale = graph.tensor(kScale, DType::kFloat32, one, one, Graph::Place::kHost);

      const Cudnn::Descriptor &raw = graph.intermediate(scores, scores_strides),
                              &scaled = graph.intermediate(scores, scores_strides);
      graph.matmul(query, key, raw);
      graph.pointwise(Graph::kMultiply, raw, &scale, scaled);
      graph.matmul(add_cudnn_softmax(graph, scaled, b, n, s, l, p_.dtype), value, output);
    };
  }

  // Strides of (batch, heads, rows, head size).
  static Graph::Sizes strides(const HeadsView& view) {
    return {view.batch_stride, view.head_stride, view.row_stride, 1};
  }

  const MultiHeadAttentionParams& p_;
};

}  // namespace sd_ort
