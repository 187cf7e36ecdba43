// Reductions, Softmax and LayerNormalization of ai.onnx that no fusion replaced.
#include <algorithm>

#include "operators/adaptive_norm/op.h"
#include "provider/kernel.h"
#include "provider/kernels/kernels.h"
#include "provider/run_op.h"

namespace sd_ort {

const GpuOp& adaptive_norm_gpu();

namespace {

// Reduces adjacent axes, merged to the middle axis of (outer, size, inner).
template <Reduction op>
class ReduceKernel : public Kernel {
 public:
  explicit ReduceKernel(const OrtKernelInfo* info)
      : keep_dims_(Attributes(info).integer("keepdims", 1) != 0),
        noop_(Attributes(info).integer("noop_with_empty_axes", 0) != 0),
        axes_(Attributes(info).integers("axes", {})) {}

  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    std::vector<int64_t> axes = axes_.empty() ? context.integers(1) : axes_;
    std::vector<bool> reduced(x.shape.size(), axes.empty() && !noop_);
    for (int64_t axis : axes) reduced[normalized_axis(axis, x.shape.size())] = true;
    int64_t outer = 1, size = 1, inner = 1;
    bool seen = false, ended = false;
    std::vector<int64_t> shape;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      require(!(reduced[i] && ended), "the reduced axes are not adjacent");
      ended = ended || (seen && !reduced[i]);
      seen = seen || reduced[i];
      (reduced[i] ? size : seen ? inner : outer) *= x.shape[i];
      if (!reduced[i] || keep_dims_) shape.push_back(reduced[i] ? 1 : x.shape[i]);
    }
    void* y = context.output(0, shape);
    check_launch(reduce(op, x.dtype(), x.data, y, outer, size, inner, context.stream()));
  }

 private:
  bool keep_dims_, noop_;
  std::vector<int64_t> axes_;
};

class Softmax : public Kernel {
 public:
  explicit Softmax(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    const int64_t columns = x.shape.back();
    if (x.size() > 0) check_launch(softmax_rows(x.dtype(), x.data, y, x.size() / columns, columns, context.stream()));
  }
};

class LayerNorm : public Kernel {
 public:
  explicit LayerNorm(const OrtKernelInfo* info)
      : axis_(Attributes(info).integer("axis", -1)), epsilon_(Attributes(info).real("epsilon", 1e-5f)) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), gamma = context.input(1), beta = context.input(2);
    int64_t columns = 1;
    for (size_t i = normalized_axis(axis_, x.shape.size()); i < x.shape.size(); ++i) columns *= x.shape[i];
    require(gamma.size() == columns && (!beta || beta.size() == columns), "LayerNormalization: the sizes differ");
    void* y = context.output(0, x.shape);
    if (x.size() == 0) return;
    AdaptiveNormParams params{};  // one scale and shift for all rows, no residual
    params.dtype = x.dtype();
    params.x = x.data;
    params.scale = gamma.data;
    params.shift = beta.data;
    params.y = y;
    params.rows = params.scale_rows = x.size() / columns;
    params.channels = columns;
    params.gate_rows = 1;
    params.epsilon = epsilon_;
    run_op(adaptive_norm_gpu(), &params, context);
  }

 private:
  int64_t axis_;
  float epsilon_;
};

// Whether the axes are adjacent; false if that is unknown.
bool are_adjacent(std::vector<int64_t> axes, int rank) {
  if (axes.size() < 2) return true;
  for (int64_t& axis : axes) {
    if (rank >= 0 && axis < 0) axis += rank;
  }
  std::sort(axes.begin(), axes.end());
  if (axes.front() < 0 && axes.back() >= 0) return false;
  for (size_t i = 1; i < axes.size(); ++i) {
    if (axes[i] - axes[i - 1] > 1) return false;
  }
  return true;
}

const char* unsupported_reduction(const Node& node) {
  if (node.input(1).exists && !node.input(1).is_constant) return "its axes are not constant";
  const std::vector<int64_t> axes = node.input(1).exists ? node.constants(1) : node.integers("axes");
  return are_adjacent(axes, node.input(0).rank) ? unsupported_float(node) : "its axes are not adjacent";
}
const char* unsupported_softmax(const Node& node) {
  if (node.since_version < 13) return "Softmax before opset 13 flattens the axes";
  const int64_t axis = node.integer("axis", -1);
  return axis == -1 || axis + 1 == node.input(0).rank ? unsupported_float(node) : "its axis is not the last";
}
const char* unsupported_layer_norm(const Node& node) {
  return node.outputs.size() > 1 ? "it has the outputs Mean and InvStdDev" : unsupported_dtypes(node);
}

}  // namespace

void add_reduction_kernels(KernelSpecs& specs) {
  specs.push_back({"", "ReduceMax", make_kernel<ReduceKernel<Reduction::kMax>>, unsupported_reduction, {1}});
  specs.push_back({"", "ReduceMean", make_kernel<ReduceKernel<Reduction::kMean>>, unsupported_reduction, {1}});
  specs.push_back({"", "ReduceMin", make_kernel<ReduceKernel<Reduction::kMin>>, unsupported_reduction, {1}});
  specs.push_back({"", "ReduceSum", make_kernel<ReduceKernel<Reduction::kSum>>, unsupported_reduction, {1}});
  specs.push_back({"", "Softmax", make_kernel<Softmax>, unsupported_softmax});
  specs.push_back({"", "LayerNormalization", make_kernel<LayerNorm>, unsupported_layer_norm});
}

}  // namespace sd_ort
