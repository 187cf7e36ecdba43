// NhwcConv as a cuDNN graph: Relu of convolution plus bias plus skip. Included only by candidates.cc.
#pragma once

#include <array>

#include "common/cudnn.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {

class CudnnConvolution {
 public:
  explicit CudnnConvolution(const NhwcConvParams& p) : p_(p) {}

  bool supports(int index) const {
    return are_aligned<16>(p_.x, p_.filters, p_.bias, p_.skip, p_.y) && cudnn().supports(key(), build(), index);
  }
  size_t workspace_bytes(int index) const { return cudnn().workspace_bytes(key(), build(), index); }
  const char* run(int index, void* workspace, void* stream) const {
    return cudnn().run(key(), build(), index,
                       {{kX, p_.x}, {kFilters, p_.filters}, {kBias, p_.bias}, {kSkip, p_.skip}, {kY, p_.y}}, workspace,
                       stream);
  }

 private:
  using Graph = Cudnn::Graph;
  static constexpr int64_t kX = 1, kFilters = 2, kY = 3, kBias = 4, kSkip = 5;

  static Cudnn& cudnn() { return Cudnn::instance(); }
  std::string key() const { return "conv_" + p_.signature(); }

  Cudnn::Build build() const {
    return [this](Graph& graph) {
      if (p_.dtype == DType::kFloat32) graph.require_float32();
      const Graph::Sizes out = {p_.batch, p_.filter_count, p_.out_height, p_.out_width};
      const auto in_memory = [&](int64_t id, const Graph::Sizes& sizes) -> const Cudnn::Descriptor& {
        return graph.tensor(id, p_.dtype, sizes, channels_last(sizes));
      };
      const Cudnn::Descriptor& x = in_memory(kX, {p_.batch, p_.channels, p_.height, p_.width});
      const Cudnn::Descriptor& filters =
          in_memory(kFilters, {p_.filter_count, p_.channels / p_.groups, p_.kernel_height, p_.kernel_width});
      const Cudnn::Descriptor& y = in_memory(kY, out);
      int remaining = (p_.bias != nullptr) + (p_.skip != nullptr) + (p_.relu != 0);
      const Cudnn::Descriptor* result = remaining == 0 ? &y : &graph.intermediate(out, channels_last(out));
      graph.convolution(description(graph), x, filters, *result);
      const auto apply = [&](Graph::Pointwise mode, const Cudnn::Descriptor* operand) {
        const Cudnn::Descriptor& next = --remaining == 0 ? y : graph.intermediate(out, channels_last(out));
        graph.pointwise(mode, *result, operand, next);
        result = &next;
      };
      if (p_.bias != nullptr) apply(Graph::kAdd, &in_memory(kBias, {1, p_.filter_count, 1, 1}));
      if (p_.skip != nullptr) apply(Graph::kAdd, &in_memory(kSkip, out));
      if (p_.relu != 0) apply(Graph::kRelu, nullptr);
    };
  }

  const Cudnn::Descriptor& description(Graph& graph) const {
    const int cross_correlation = Cudnn::kCrossCorrelation;
    const int64_t axes = 2, dilations[] = {p_.dilation_height, p_.dilation_width},
                  strides[] = {p_.stride_height, p_.stride_width}, before[] = {p_.pad_top, p_.pad_left},
                  after[] = {p_.pad_bottom, p_.pad_right};
    Cudnn::Descriptor& descriptor = graph.description(Cudnn::kConvolution);
    descriptor.set(cudnn_attribute::kConvolutionType, Cudnn::kTypeData, 1, &Cudnn::kFloat);
    descriptor.set(cudnn_attribute::kConvolutionMode, Cudnn::kTypeConvolutionMode, 1, &cross_correlation);
    descriptor.set(cudnn_attribute::kConvolutionDilations, Cudnn::kTypeInt64, 2, dilations);
    descriptor.set(cudnn_attribute::kConvolutionStrides, Cudnn::kTypeInt64, 2, strides);
    descriptor.set(cudnn_attribute::kConvolutionPadsAfter, Cudnn::kTypeInt64, 2, after);
    descriptor.set(cudnn_attribute::kConvolutionPadsBefore, Cudnn::kTypeInt64, 2, before);
    descriptor.set(cudnn_attribute::kConvolutionAxes, Cudnn::kTypeInt64, 1, &axes);
    descriptor.finalize();
    return descriptor;
  }

  // Strides of sizes (N, C, H, W) in NHWC memory layout.
  static Graph::Sizes channels_last(const Graph::Sizes& s) { return {s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]}; }

  const NhwcConvParams& p_;
};

}  // namespace sd_ort
