// Binding of LinearSplitGelu.
#pragma once

#include <vector>

#include "operators/bias_split_gelu/binding.h"
#include "operators/linear_add/binding.h"
#include "operators/linear_split_gelu/op.h"

namespace sd_ort {

struct LinearSplitGeluBinding {
  using Params = LinearSplitGeluParams;
  static constexpr const char* kName = "LinearSplitGelu";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT}, {Port::kT}};  // X, W, bias
  static constexpr Port kOutputs[] = {{Port::kT}};                         // Y

  static Params attributes(const Attributes&) { return {}; }

  static void infer(Shapes&) {}

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), weight = tensors.input(1), bias = tensors.input(2);
    require(!x.shape.empty() && weight.shape.size() == 2 && weight.shape[0] == x.shape.back(),
            "LinearSplitGelu: W must be (K, D), K the last axis of X");
    const int64_t columns = weight.shape[1];
    require(columns % 2 == 0, "LinearSplitGelu: W must have an even number of columns");
    require(bias.has_shape({columns}), "LinearSplitGelu: bias must have one element a column of W");
    params.inner = weight.shape[0];
    params.half = columns / 2;
    params.x = x.data;
    params.weight = weight.data;
    params.bias = bias.data;
    std::vector<int64_t> shape = x.shape;
    shape.back() = params.half;
    params.y = tensors.output(0, shape);
    params.rows = Tensor{params.y, shape}.rows();  // not x.rows(): if K is 0, X is empty and Y is not
  }

  // Runs the two operators that it fuses.
  static void cpu(const Params& p, const Parallel& parallel) {
    std::vector<char> product(2 * p.rows * p.half * size_of(p.dtype));
    linear_add_cpu({p.dtype, p.x, p.weight, nullptr, nullptr, product.data(), p.rows, p.inner, 2 * p.half}, parallel);
    bias_split_gelu_cpu({p.dtype, product.data(), p.bias, p.y, p.rows, p.half}, parallel);
  }
};

}  // namespace sd_ort
