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

  void compute(Call& call) const override {
    const Tensor x = call.input(0), weight = call.input(1);
    const std::vector<int64_t> x_batch(x.shape.begin(), x.shape.end() - 2);
    const std::vector<int64_t> weight_batch(weight.shape.begin(), weight.shape.end() - 2);
    ProductParams p{};
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
    p.y = call.output(0, shape);
    if (p.y == nullptr || count_of(shape) == 0) return;
    p.batch = count_of(batch);
    const int64_t matrices = count_of(x_batch), weights = count_of(weight_batch);
    if (weights == 1) {  // all rows of X meet the one matrix
      p.rows *= p.batch;
      p.batch = 1;
    } else if (weights < p.batch || (matrices > 1 && matrices < p.batch)) {
      return compute_repeated(call, p, batch, x_batch, weight_batch);
    } else {
      p.x_batch_stride = matrices == 1 ? 0 : p.rows * p.inner;
      p.weight_batch_stride = p.inner * p.columns;
    }
    run_op(product_op(), &p, call);
  }

 private:
  // Where one of them, or each, repeats in some of the batch axes: a call for each element of all but the last.
  static void compute_repeated(Call& call, ProductParams p, const std::vector<int64_t>& batch,
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
      ProductParams each = p;
      int64_t x_at = 0, weight_at = 0, rest = index;
      for (size_t axis = batch.size() - 1; axis-- > 0; rest /= batch[axis]) {
        x_at += rest % batch[axis] * x_strides[axis];
        weight_at += rest % batch[axis] * weight_strides[axis];
      }
      each.x = static_cast<const char*>(p.x) + x_at * x_size * bytes;
      each.weight = static_cast<const char*>(p.weight) + weight_at * weight_size * bytes;
      each.y = static_cast<char*>(p.y) + index * p.batch * y_size * bytes;
      run_op(product_op(), &each, call);
    }
  }
};

const char* refuses_mat_mul(const Node& node) {
  if (!is_float(node.input(0).type)) return "X is neither float32, float16 nor bfloat16";
  if (node.input(1).type != node.input(0).type) return "its inputs differ in type";
  const int x = node.input(0).rank, weight = node.input(1).rank;
  if (x < 2 || weight < 2) return "a vector, or a tensor of unknown rank";
  return nullptr;
}

class Gemm : public Kernel {
 public:
  explicit Gemm(const OrtKernelInfo* info)
      : transposed_(Attributes(info).integer("transB", 0) != 0), alpha_(Attributes(info).real("alpha", 1.f)) {}

  void compute(Call& call) const override {
    const Tensor x = call.input(0), weight = call.input(1), bias = call.input(2);
    ProductParams p{};
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
    p.y = call.output(0, {p.rows, p.columns});
    if (p.rows * p.columns > 0) run_op(product_op(), &p, call);
  }

 private:
  bool transposed_;
  float alpha_;
};

const char* refuses_gemm(const Node& node) {
  if (!is_float(node.input(0).type)) return "X is neither float32, float16 nor bfloat16";
  if (node.input(1).type != node.input(0).type) return "its inputs differ in type";
  if (node.integer("transA", 0) != 0) return "A is transposed";
  if (node.input(2).there && node.real("beta", 1.f) != 1.f) return "C is scaled";
  const NodeValue &weight = node.input(1), &bias = node.input(2);
  if (!bias.there) return nullptr;
  if (bias.rank != 1 || bias.shape[0] < 0) return "C is no vector of a known size";
  const int64_t columns = weight.rank == 2 ? weight.shape[node.integer("transB", 0) != 0 ? 0 : 1] : -1;
  return bias.shape[0] == 1 && columns != 1 ? "C is one number" : nullptr;
}

}  // namespace

void add_product_kernels(KernelSpecs& specs) {
  specs.push_back({"", "MatMul", make_kernel<MatMul>, refuses_mat_mul});
  specs.push_back({"", "Gemm", make_kernel<Gemm>, refuses_gemm});
}

}  // namespace sd_ort
