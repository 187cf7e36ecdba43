// Reductions, Softmax and LayerNormalization of ai.onnx that no fusion took.
#include <algorithm>

#include "provider/kernel.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

// Over neighboring axes, which one axis of a (outer, size, inner) tensor is.
template <Reduction op>
class ReduceKernel : public Kernel {
 public:
  explicit ReduceKernel(const OrtKernelInfo* info)
      : keep_(Attributes(info).integer("keepdims", 1) != 0),
        nothing_(Attributes(info).integer("noop_with_empty_axes", 0) != 0),
        axes_(Attributes(info).integers("axes", {})) {}

  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    std::vector<int64_t> axes = axes_.empty() ? call.integers(1) : axes_;
    std::vector<bool> reduced(x.shape.size(), axes.empty() && !nothing_);
    for (int64_t axis : axes) reduced[axis_of(axis, x.shape.size())] = true;
    int64_t outer = 1, size = 1, inner = 1;
    bool seen = false, ended = false;
    std::vector<int64_t> shape;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      require(!(reduced[i] && ended), "the reduced axes are no neighbors");
      ended = ended || (seen && !reduced[i]);
      seen = seen || reduced[i];
      (reduced[i] ? size : seen ? inner : outer) *= x.shape[i];
      if (!reduced[i] || keep_) shape.push_back(reduced[i] ? 1 : x.shape[i]);
    }
    void* y = call.output(0, shape);
    launched(reduce(op, x.dtype(), x.data, y, outer, size, inner, call.stream()));
  }

 private:
  bool keep_, nothing_;
  std::vector<int64_t> axes_;
};

class Softmax : public Kernel {
 public:
  explicit Softmax(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    const int64_t columns = x.shape.back();
    if (x.size() > 0) launched(softmax_rows(x.dtype(), x.data, y, x.size() / columns, columns, call.stream()));
  }
};

class LayerNorm : public Kernel {
 public:
  explicit LayerNorm(const OrtKernelInfo* info)
      : axis_(Attributes(info).integer("axis", -1)), epsilon_(Attributes(info).real("epsilon", 1e-5f)) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), gamma = call.input(1), beta = call.input(2);
    int64_t columns = 1;
    for (size_t i = axis_of(axis_, x.shape.size()); i < x.shape.size(); ++i) columns *= x.shape[i];
    require(gamma.size() == columns && (!beta || beta.size() == columns), "LayerNormalization: the sizes differ");
    void* y = call.output(0, x.shape);
    if (x.size() == 0) return;
    launched(layer_norm_rows(x.dtype(), x.data, gamma.data, beta.data, y, x.size() / columns, columns, epsilon_,
                             call.stream()));
  }

 private:
  int64_t axis_;
  float epsilon_;
};

const char* refuses_float(const Node& node) {
  return is_float(node.input(0).type) ? nullptr : "X is neither float32, float16 nor bfloat16";
}
// Whether no axis lies between two of these; not where that cannot be known.
bool are_neighbors(std::vector<int64_t> axes, int rank) {
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

const char* refuses_reduction(const Node& node) {
  if (node.input(1).there && !node.input(1).is_constant) return "its axes are computed";
  const std::vector<int64_t> axes = node.input(1).there ? node.constants(1) : node.integers("axes");
  return are_neighbors(axes, node.input(0).rank) ? refuses_float(node) : "its axes are no neighbors";
}
const char* refuses_softmax(const Node& node) {
  if (node.since_version < 13) return "opsets before 13 flatten the axes";
  const int64_t axis = node.integer("axis", -1);
  return axis == -1 || axis + 1 == node.input(0).rank ? refuses_float(node) : "its axis is not the last";
}
const char* refuses_layer_norm(const Node& node) {
  if (node.input(1).type != node.input(0).type) return "its inputs differ in type";
  return node.outputs.size() > 1 ? "its statistics are asked for" : refuses_float(node);
}

}  // namespace

void add_reduction_kernels(KernelSpecs& specs) {
  specs.push_back({"", "ReduceMax", make_kernel<ReduceKernel<Reduction::kMax>>, refuses_reduction, {1}});
  specs.push_back({"", "ReduceMean", make_kernel<ReduceKernel<Reduction::kMean>>, refuses_reduction, {1}});
  specs.push_back({"", "ReduceMin", make_kernel<ReduceKernel<Reduction::kMin>>, refuses_reduction, {1}});
  specs.push_back({"", "ReduceSum", make_kernel<ReduceKernel<Reduction::kSum>>, refuses_reduction, {1}});
  specs.push_back({"", "Softmax", make_kernel<Softmax>, refuses_softmax});
  specs.push_back({"", "LayerNormalization", make_kernel<LayerNorm>, refuses_layer_norm});
}

}  // namespace sd_ort
