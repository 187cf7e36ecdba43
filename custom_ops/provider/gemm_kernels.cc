// MatMul and Gemm of ai.onnx.
#include <algorithm>

#include "provider/gemm.h"
#include "provider/kernels/kernels.h"
#include "provider/run_op.h"

namespace sd_ort {
namespace {

class MatMul : public Kernel {
 public:
  explicit MatMul(const OrtKernelInfo*) {}

  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), weight = context.input(1);
    const std::vector<int64_t> x_batch(x.shape.begin(), x.shape.end() - 2);
    const std::vector<int64_t> weight_batch(weight.shape.begin(), weight.shape.end() - 2);
    GemmParams p{};
    p.dtype = x.dtype();
    p.rows = x.shape[x.shape.size() - 2];
    p.inner = x.shape.back();
    p.columns = weight.shape.back();
    p.scale = 1.f;
    require(weight.shape[weight.shape.size() - 2] == p.inner, "MatMul: the inner sizes differ");
    const std::vector<int64_t> batch = broadcast_shape({x_batch, weight_batch});
    std::vector<int64_t> shape = batch;
    shape.push_back(p.rows);
    shape.push_back(p.columns);
    p.x = x.data;
    p.weight = weight.data;
    p.y = context.output(0, shape);
    if (p.y == nullptr || element_count(shape) == 0) return;
    p.batch = element_count(batch);
    const int64_t matrices = element_count(x_batch), weights = element_count(weight_batch);
    if (weights == 1) {  // one weight for all: the batch axes of X become rows
      p.rows *= p.batch;
      p.batch = 1;
    } else if (weights < p.batch || (matrices > 1 && matrices < p.batch)) {
      return compute_broadcast(context, p, batch, x_batch, weight_batch);
    } else {
      p.x_batch_stride = matrices == 1 ? 0 : p.rows * p.inner;
      p.weight_batch_stride = p.inner * p.columns;
    }
    run_op(gemm_op(), &p, context);
  }

 private:
  // X or the weight is broadcast along some batch axes: one GEMM for each index of all batch axes but the last.
  static void compute_broadcast(KernelContext& context, GemmParams p, const std::vector<int64_t>& batch,
                                const std::vector<int64_t>& x_batch, const std::vector<int64_t>& weight_batch) {
    std::vector<int64_t> x_strides(batch.size()), weight_strides(batch.size());
    set_strides(x_batch, batch, x_strides.data());
    set_strides(weight_batch, batch, weight_strides.data());
    const int64_t bytes = static_cast<int64_t>(size_of(p.dtype)), calls = p.batch / batch.back();
    const int64_t x_size = p.rows * p.inner, weight_size = p.inner * p.columns, y_size = p.rows * p.columns;
    p.batch = batch.back();
    p.x_batch_stride = x_strides.back() * x_size;
    p.weight_batch_stride = weight_strides.back() * weight_size;
    for (int64_t index = 0; index < calls; ++index) {
      GemmParams entry = p;
      int64_t x_offset = 0, weight_offset = 0, rest = index;
      for (size_t axis = batch.size() - 1; axis-- > 0; rest /= batch[axis]) {
        x_offset += rest % batch[axis] * x_strides[axis];
        weight_offset += rest % batch[axis] * weight_strides[axis];
      }
      entry.x = static_cast<const char*>(p.x) + x_offset * x_size * bytes;
      entry.weight = static_cast<const char*>(p.weight) + weight_offset * weight_size * bytes;
      entry.y = static_cast<char*>(p.y) + index * p.batch * y_size * bytes;
      run_op(gemm_op(), &entry, context);
    }
  }
};

const char* unsupported_mat_mul(const Node& node) {
  if (const char* reason = unsupported_dtypes(node)) return reason;
  const int x = node.input(0).rank, weight = node.input(1).rank;
  if (x < 2 || weight < 2) return "an input is a vector or has unknown rank";
  return nullptr;
}

class Gemm : public Kernel {
 public:
  explicit Gemm(const OrtKernelInfo* info)
      : transposed_(Attributes(info).integer("transB", 0) != 0), alpha_(Attributes(info).real("alpha", 1.f)) {}

  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), weight = context.input(1), bias = context.input(2);
    GemmParams p{};
    p.dtype = x.dtype();
    p.batch = 1;
    p.rows = x.shape[0];
    p.inner = x.shape[1];
    p.columns = weight.shape[transposed_ ? 0 : 1];
    p.transposed = transposed_;
    p.scale = alpha_;
    require(weight.shape[transposed_ ? 1 : 0] == p.inner, "Gemm: the inner sizes differ");
    require(!bias || bias.size() == p.columns, "Gemm: C must have one element a column");
    p.x = x.data;
    p.weight = weight.data;
    p.bias = bias.data;
    p.y = context.output(0, {p.rows, p.columns});
    if (p.rows * p.columns > 0) run_op(gemm_op(), &p, context);
  }

 private:
  bool transposed_;
  float alpha_;
};

const char* unsupported_gemm(const Node& node) {
  if (const char* reason = unsupported_dtypes(node)) return reason;
  if (node.integer("transA", 0) != 0) return "A is transposed";
  if (node.input(2).exists && node.real("beta", 1.f) != 1.f) return "C is scaled";
  const NodeValue &weight = node.input(1), &bias = node.input(2);
  if (!bias.exists) return nullptr;
  if (bias.rank != 1 || bias.shape[0] < 0) return "C is not a vector of known size";
  const int64_t columns = weight.rank == 2 ? weight.shape[node.integer("transB", 0) != 0 ? 0 : 1] : -1;
  return bias.shape[0] == 1 && columns != 1 ? "C is a scalar" : nullptr;
}

}  // namespace

void add_gemm_kernels(KernelSpecs& specs) {
  specs.push_back({"", "MatMul", make_kernel<MatMul>, unsupported_mat_mul});
  specs.push_back({"", "Gemm", make_kernel<Gemm>, unsupported_gemm});
}

}  // namespace sd_ort
