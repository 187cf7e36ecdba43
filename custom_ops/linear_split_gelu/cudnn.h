// The gate of LinearSplitGelu as a graph that cuDNN runs as one kernel: Y = left * gelu(X W + bias) of the right halves
// of W and bias, where left is there already. Included by candidates.cc alone.
#pragma once

#include "common/cudnn.h"
#include "linear_split_gelu/op.h"

namespace sd_ort {

class CudnnGate {
 public:
  explicit CudnnGate(const LinearSplitGeluParams& p) : p_(p) {}

  bool supports(int number) const {
    return p_.dtype != DType::kFloat32 && p_.rows > 0 && p_.inner > 0 && p_.half > 0 && p_.inner % 8 == 0 &&
           p_.half % 8 == 0 && Cudnn::instance().supports(key(), build(), number);
  }
  size_t workspace_bytes(int number) const { return Cudnn::instance().workspace_bytes(key(), build(), number); }
  const char* run(int number, const void* left, void* workspace, void* stream) const {
    const size_t right = static_cast<size_t>(p_.half) * size_of(p_.dtype);  // bytes to the right half of a row
    return Cudnn::instance().run(key(), build(), number,
                                 {{kX, p_.x},
                                  {kWeight, static_cast<const char*>(p_.weight) + right},
                                  {kBias, static_cast<const char*>(p_.bias) + right},
                                  {kLeft, left},
                                  {kY, p_.y}},
                                 workspace, stream);
  }

 private:
  using Graph = Cudnn::Graph;
  static constexpr int64_t kX = 1, kWeight = 2, kBias = 3, kLeft = 4, kY = 5;

  std::string key() const { return "linear_split_gelu_" + p_.signature(); }

  Cudnn::Build build() const {
    return [this](Graph& graph) {
      const int64_t m = p_.rows, k = p_.inner, n = p_.half;
      const Graph::Sizes sizes = {1, m, n}, strides = {m * n, n, 1};
      const Cudnn::Descriptor& x = graph.tensor(kX, p_.dtype, {1, m, k}, {m * k, k, 1});
      const Cudnn::Descriptor& weight = graph.tensor(kWeight, p_.dtype, {1, k, n}, {2 * k * n, 2 * n, 1});
      const Cudnn::Descriptor& bias = graph.tensor(kBias, p_.dtype, {1, 1, n}, {n, n, 1});
      const Cudnn::Descriptor& left = graph.tensor(kLeft, p_.dtype, sizes, strides);
      const Cudnn::Descriptor& y = graph.tensor(kY, p_.dtype, sizes, strides);
      const Cudnn::Descriptor &product = graph.intermediate(sizes, strides), &right = graph.intermediate(sizes, strides),
                              &gate = graph.intermediate(sizes, strides);
      graph.product(x, weight, product);
      graph.pointwise(Graph::kAdd, product, &bias, right);
      graph.pointwise(Graph::kGelu, right, nullptr, gate);
      graph.pointwise(Graph::kMultiply, gate, &left, y);
    };
  }

  const LinearSplitGeluParams& p_;
};

}  // namespace sd_ort
