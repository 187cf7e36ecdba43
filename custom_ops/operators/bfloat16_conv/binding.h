// Binding of Bfloat16Conv.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "common/packed_weights.h"
#include "operators/bfloat16_conv/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(bfloat16_conv, Bfloat16ConvParams)

// What Bfloat16Conv and QuantizedConv have in common; Op is one of their bindings.
template <class Op>
struct TileConvBinding {
  using Params = Bfloat16ConvParams;
  using State = PackedWeights;
  static constexpr Port kOutputs[] = {{Port::kT}};  // Y
  static constexpr size_t kConstant = 1;

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.stride = attributes.integer("stride", 1);
    require(params.stride == 1 || params.stride == 2, std::string(Op::kName) + ": stride must be 1 or 2");
    params.x_last = attributes.integer("x_last", 0) != 0;
    params.y_last = attributes.integer("y_last", 0) != 0;
    return params;
  }

  // Infers Y, whose type is that of input `typed_by`.
  static void infer_typed(Shapes& shapes, size_t typed_by) {
    if (!shapes.has(0) || !shapes.has(1)) return;
    std::vector<Dim> dims = shapes.input(0);
    if (dims.size() == 4 && shapes.integer("x_last", 0) != 0) dims = {dims[0], dims[3], dims[1], dims[2]};
    dims.at(1) = shapes.input(1)[0];
    if (dims.size() == 4 && shapes.integer("y_last", 0) != 0) dims = {dims[0], dims[2], dims[3], dims[1]};
    if (shapes.integer("stride", 1) == 2) {
      for (size_t i = 2; i < dims.size(); ++i) dims[i] = dims[i].known() ? Dim{ceil_div(dims[i].value, 2), ""} : Dim{};
    }
    shapes.set_output(dims, typed_by);
  }

  static void bind_images(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), filters = tensors.input(1), bias = tensors.input(Op::kBias);
    require(x.shape.size() == 4, std::string(Op::kName) + ": X must be (N, C, H, W), or (N, H, W, C) where x_last");
    params.batch = x.shape[0];
    params.channels = x.shape[params.x_last ? 3 : 1];
    params.height = x.shape[params.x_last ? 1 : 2];
    params.width = x.shape[params.x_last ? 2 : 3];
    require(filters.shape.size() == 4 && filters.shape[1] == params.channels && filters.shape[2] == filters.shape[3] &&
                (filters.shape[2] == 1 || filters.shape[2] == 3),
            std::string(Op::kName) + ": W must be (M, C, 3, 3) or (M, C, 1, 1), with the channels of X");
    params.filter_count = filters.shape[0];
    params.edge = filters.shape[2];
    require(!bias || bias.has_shape({params.filter_count}),
            std::string(Op::kName) + ": B must have one element a filter");
    params.x = x.data;
    params.filters = filters.data;
    params.bias = bias.data;
    require((params.edge == 1 && params.stride == 1) || (!params.x_last && !params.y_last),
            std::string(Op::kName) + ": channels are last beside filters of 1 x 1 and a stride of 1 only");
    const int64_t lines = ceil_div(params.height, params.stride), columns = ceil_div(params.width, params.stride);
    params.y = params.y_last ? tensors.output(0, {params.batch, lines, columns, params.filter_count})
                             : tensors.output(0, {params.batch, params.filter_count, lines, columns});
  }

  static void cpu(const Params& call, const Parallel& parallel) {
    if (call.batch == 0 || call.filter_count == 0 || call.height == 0 || call.width == 0) return;
    Params params = call;
    PackedWeights temporary;
    PackedWeights& weights = params.packed_weights == nullptr ? temporary : *params.packed_weights;
    const int64_t taps = params.edge * params.edge;
    params.packed = weights.get(
        {params.filters, params.weight_dtype, params.channels, taps, params.filter_count, taps, params.channels * taps},
        parallel);
    bfloat16_conv_cpu(params, parallel);
  }
};

struct Bfloat16ConvBinding : TileConvBinding<Bfloat16ConvBinding> {
  static constexpr const char* kName = "Bfloat16Conv";
  static constexpr size_t kBias = 2;
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kAny}, {Port::kT, true}};  // X, W, B

  static void infer(Shapes& shapes) { infer_typed(shapes, 0); }

  static void bind(Tensors& tensors, Params& params) {
    require(params.dtype == DType::kFloat32, "Bfloat16Conv: X must be float32");
    params.weight_dtype = tensors.input(1).dtype();
    require(params.weight_dtype != DType::kFloat16, "Bfloat16Conv: W must be bfloat16 or float32");
    bind_images(tensors, params);
  }
};

}  // namespace sd_ort
