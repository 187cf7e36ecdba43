// Binding of QuantizedConv. Its kernel is that of Bfloat16Conv, with int8 elements and `scale` in Params.
#pragma once

#include "operators/bfloat16_conv/binding.h"

namespace sd_ort {

struct QuantizedConvBinding : TileConvBinding<QuantizedConvBinding> {
  static constexpr const char* kName = "QuantizedConv";
  static constexpr size_t kBias = 3;
  static constexpr Port kInputs[] = {{Port::kAny}, {Port::kAny}, {Port::kAny}, {Port::kT}};  // X, W, scale, B
  static constexpr size_t kTypedBy = 3;                                                      // T is the type of B

  static void infer(Shapes& shapes) { infer_typed(shapes, kTypedBy); }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), filters = tensors.input(1), scale = tensors.input(2);
    require(params.dtype == DType::kFloat32, "QuantizedConv: B must be float32");
    require(x.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 && filters.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
            "QuantizedConv: X and W must be int8");
    params.weight_dtype = DType::kInt8;
    bind_images(tensors, params);
    require(scale.is_scale_of(params.filter_count), "QuantizedConv: scale must be one float32 number, or one a filter");
    params.scale = static_cast<const float*>(scale.data);
    params.scales = scale.size() == 1;
  }
};

}  // namespace sd_ort
