// MatMul and Gemm of ai.onnx.
#include <algorithm>

#include "provider/kernels/kernels.h"
#include "provider/products.h"
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
    const bool one_weight = count_of(weight_batch) == 1, one_x = count_of(x_batch) == 1;
    require(one_weight || one_x || x_batch == weight_batch, "MatMul: the batch axes differ");
    std::vector<int64_t> shape =
        x_batch.size() >= weight_batch.size() && !(one_x && !one_weight) ? x_batch : weight_batch;
    p.batch = count_of(shape);
    if (one_weight) {  // all rows of X meet the one matrix
      p.rows *= p.batch;
      p.batch = 1;
    } else {
      p.x_batch_stride = one_x ? 0 : p.rows * p.inner;
      p.weight_batch_stride = p.inner * p.columns;
    }
    shape.push_back(x.shape[x.shape.size() - 2]);
    shape.push_back(p.columns);
    p.x = x.data;
    p.weight = weight.data;
    p.y = call.output(0, shape);
    if (p.y != nullptr && count_of(shape) > 0) run_op(product_op(), &p, call);
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
  if (node.input(2).there && node.input(2).rank != 1) return "C is no vector";
  return nullptr;
}

}  // namespace

void add_product_kernels(KernelSpecs& specs) {
  specs.push_back({"", "MatMul", make_kernel<MatMul>, refuses_mat_mul});
  specs.push_back({"", "Gemm", make_kernel<Gemm>, refuses_gemm});
}

}  // namespace sd_ort
