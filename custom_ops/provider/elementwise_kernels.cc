// Elementwise operators: unary, binary with broadcasting, Where, Clip, Equal, Cast, and to and from 8 bits.
#include <algorithm>

#include "provider/kernel.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

// Returns the broadcast of a, b and Where's condition to `target`, with adjacent axes merged where possible.
Broadcast make_broadcast(const std::vector<int64_t>& target, const std::vector<int64_t>& a,
                         const std::vector<int64_t>& b, const std::vector<int64_t>& condition) {
  require(target.size() <= kMaxAxes, "a tensor has more than 8 axes");
  int64_t strides[3][kMaxAxes];
  set_strides(a, target, strides[0]);
  set_strides(b, target, strides[1]);
  set_strides(condition, target, strides[2]);
  Broadcast merged{};
  int64_t* const to[] = {merged.a_strides, merged.b_strides, merged.condition_strides};
  for (size_t axis = 0; axis < target.size(); ++axis) {
    if (target[axis] == 1) continue;
    const int last = merged.axes - 1;
    bool joins = merged.axes > 0;
    for (int k = 0; k < 3; ++k) joins = joins && to[k][last] == target[axis] * strides[k][axis];
    const int index = joins ? last : merged.axes++;
    merged.sizes[index] = joins ? merged.sizes[index] * target[axis] : target[axis];
    for (int k = 0; k < 3; ++k) to[k][index] = strides[k][axis];
  }
  return merged;
}

template <Unary op>
class UnaryKernel : public Kernel {
 public:
  explicit UnaryKernel(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    check_launch(unary(op, x.dtype(), x.data, y, x.size(), 0.f, context.stream()));
  }
};

class Gelu : public Kernel {
 public:
  explicit Gelu(const OrtKernelInfo* info)
      : op_(Attributes(info).text("approximate", "none") == "tanh" ? Unary::kGeluTanh : Unary::kGelu) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    check_launch(unary(op_, x.dtype(), x.data, y, x.size(), 0.f, context.stream()));
  }

 private:
  Unary op_;
};

template <Binary op>
class BinaryKernel : public Kernel {
 public:
  explicit BinaryKernel(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor a = context.input(0), b = context.input(1);
    const std::vector<int64_t> target = broadcast_shape({a.shape, b.shape});
    void* y = context.output(0, target);
    if (element_count(target) == 0) return;
    check_launch(
        binary(op, a.dtype(), make_broadcast(target, a.shape, b.shape, {}), a.data, b.data, y, context.stream()));
  }
};

class Clip : public Kernel {
 public:
  explicit Clip(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), low = context.input(1), high = context.input(2);
    void* y = context.output(0, x.shape);
    check_launch(clip(x.dtype(), x.data, low.data, high.data, y, x.size(), context.stream()));
  }
};

class Where : public Kernel {
 public:
  explicit Where(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor condition = context.input(0), a = context.input(1), b = context.input(2);
    const std::vector<int64_t> target = broadcast_shape({condition.shape, a.shape, b.shape});
    void* y = context.output(0, target);
    if (element_count(target) == 0) return;
    check_launch(where(make_broadcast(target, a.shape, b.shape, condition.shape), condition.data, a.data, b.data, y,
                       static_cast<int>(element_bytes(a.type)), context.stream()));
  }
};

// Returns the ElementType of an ONNX type, or -1.
int element_type_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return static_cast<int>(ElementType::kFloat32);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return static_cast<int>(ElementType::kFloat16);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return static_cast<int>(ElementType::kBFloat16);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return static_cast<int>(ElementType::kFloat64);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return static_cast<int>(ElementType::kInt32);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return static_cast<int>(ElementType::kInt64);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return static_cast<int>(ElementType::kUInt8);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return static_cast<int>(ElementType::kBool);
    default:
      return -1;
  }
}

// Arithmetic of floating-point or of int32 and int64 tensors (counters of the sampling loop).
template <Binary op>
class ArithmeticKernel : public BinaryKernel<op> {
 public:
  using BinaryKernel<op>::BinaryKernel;
  void compute(KernelContext& context) const override {
    const Tensor a = context.input(0), b = context.input(1);
    if (is_float(a.type)) return BinaryKernel<op>::compute(context);
    const std::vector<int64_t> target = broadcast_shape({a.shape, b.shape});
    void* y = context.output(0, target);
    if (element_count(target) == 0) return;
    check_launch(binary_integers(op, static_cast<ElementType>(element_type_of(a.type)),
                                 make_broadcast(target, a.shape, b.shape, {}), a.data, b.data, y, context.stream()));
  }
};

template <Comparison op>
class Compare : public Kernel {
 public:
  explicit Compare(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor a = context.input(0), b = context.input(1);
    const std::vector<int64_t> target = broadcast_shape({a.shape, b.shape});
    void* y = context.output(0, target);
    if (element_count(target) == 0) return;
    check_launch(compare(op, static_cast<ElementType>(element_type_of(a.type)),
                         make_broadcast(target, a.shape, b.shape, {}), a.data, b.data, y, context.stream()));
  }
};

class Cast : public Kernel {
 public:
  explicit Cast(const OrtKernelInfo* info)
      : to_(static_cast<ONNXTensorElementDataType>(Attributes(info).required_integer("to"))) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    check_launch(cast(static_cast<ElementType>(element_type_of(x.type)), x.data,
                      static_cast<ElementType>(element_type_of(to_)), y, x.size(), context.stream()));
  }

 private:
  ONNXTensorElementDataType to_;
};

// QuantizeLinear to float8 or int8 by one scale, without zero point.
class Quantize : public Kernel {
 public:
  explicit Quantize(const OrtKernelInfo* info)
      : type_(static_cast<ONNXTensorElementDataType>(Attributes(info).required_integer("output_dtype"))) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), scale = context.input(1);
    void* y = context.output(0, x.shape);
    require(scale.size() == 1, "QuantizeLinear: the scale must be one number");
    const DType eight_bits = type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? DType::kInt8 : DType::kFloat8;
    check_launch(quantize(x.dtype(), x.data, scale.data, eight_bits, y, x.size(), context.stream()));
  }

 private:
  ONNXTensorElementDataType type_;
};

// Returns the StoredType of an ONNX type, or -1.
int stored_type_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return static_cast<int>(StoredType::kInt8);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return static_cast<int>(StoredType::kUInt8);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4:
      return static_cast<int>(StoredType::kInt4);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4:
      return static_cast<int>(StoredType::kUInt4);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN:
      return static_cast<int>(StoredType::kFloat8);
    default:
      return -1;
  }
}

// DequantizeLinear of stored weights: one scale, one for each index of an axis, or one for each block along an axis.
class Dequantize : public Kernel {
 public:
  explicit Dequantize(const OrtKernelInfo* info)
      : axis_(Attributes(info).integer("axis", 1)), block_(Attributes(info).integer("block_size", 0)) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), scale = context.input(1), zero_points = context.input(2);
    void* y = context.output(0, x.shape);
    if (x.size() == 0) return;
    DequantizeCall call{static_cast<StoredType>(stored_type_of(x.type)), x.data, scale.data, zero_points.data, y};
    call.outer = call.inner = call.block = 1;
    call.size = x.size();
    if (scale.shape.empty()) {  // one scale
      call.block = call.size;
    } else {
      const size_t axis = static_cast<size_t>(normalized_axis(axis_, x.shape.size()));
      for (size_t i = 0; i < x.shape.size(); ++i) (i < axis ? call.outer : call.inner) *= i == axis ? 1 : x.shape[i];
      call.size = x.shape[axis];
      std::vector<int64_t> expected = {call.size};
      call.block_stride = 1;
      if (block_ > 0) {
        expected = x.shape;
        expected[axis] = ceil_div(call.size, block_);
        call.block = block_;
        call.outer_stride = expected[axis] * call.inner;
        call.block_stride = call.inner;
        call.inner_stride = 1;
      }
      require(scale.shape == expected, "DequantizeLinear: the scale does not have the shape that its axis asks for");
    }
    require(!zero_points || zero_points.shape == scale.shape, "DequantizeLinear: zero points must have scale's shape");
    check_launch(dequantize(scale.dtype(), call, context.stream()));
  }

 private:
  int64_t axis_, block_;
};

const char* unsupported_dequantize(const Node& node) {
  if (stored_type_of(node.input(0).type) < 0) return "its input is neither float8e4m3fn nor an integer of 4 or 8 bits";
  if (!is_float(node.input(1).type)) return "its scale is not float32, float16 or bfloat16";
  return node.outputs.at(0).type != node.input(1).type ? "its output is not of the scale's type" : nullptr;
}

const char* unsupported_quantize(const Node& node) {
  if (node.inputs.size() > 2 && node.input(2).exists) return "it has a zero point";
  const auto type = node.outputs.at(0).type;
  if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 && type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN) {
    return "its output is neither float8e4m3fn nor int8";
  }
  return node.has("output_dtype") ? unsupported_dtypes(node) : "it has no output_dtype";
}

const char* unsupported_binary(const Node& node) {
  return node.inputs.size() != 2 ? "it does not have two inputs" : unsupported_dtypes(node);
}

const char* unsupported_arithmetic(const Node& node) {
  const auto type = node.input(0).type;
  const bool integer = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  return integer && node.inputs.size() == 2 ? nullptr : unsupported_binary(node);
}

const char* unsupported_equal(const Node& node) {
  return element_type_of(node.input(0).type) >= 0 ? nullptr : "its element type is not supported";
}

const char* unsupported_clip(const Node& node) {
  return node.since_version < 11 ? "its bounds are attributes (opset before 11)" : unsupported_float(node);
}

const char* unsupported_where(const Node& node) {
  return element_bytes(node.input(1).type) == 0 ? "its type has no fixed size" : nullptr;
}

const char* unsupported_cast(const Node& node) {
  const bool supported = element_type_of(node.input(0).type) >= 0 && element_type_of(node.outputs.at(0).type) >= 0;
  return supported ? nullptr : "a cast from or to an unsupported element type";
}

}  // namespace

void add_elementwise_kernels(KernelSpecs& specs) {
  specs.push_back({"", "Abs", make_kernel<UnaryKernel<Unary::kAbs>>, unsupported_float});
  specs.push_back({"", "Cos", make_kernel<UnaryKernel<Unary::kCos>>, unsupported_float});
  specs.push_back({"", "Erf", make_kernel<UnaryKernel<Unary::kErf>>, unsupported_float});
  specs.push_back({"", "Exp", make_kernel<UnaryKernel<Unary::kExp>>, unsupported_float});
  specs.push_back({"", "Log", make_kernel<UnaryKernel<Unary::kLog>>, unsupported_float});
  specs.push_back({"", "Neg", make_kernel<UnaryKernel<Unary::kNeg>>, unsupported_float});
  specs.push_back({"", "Reciprocal", make_kernel<UnaryKernel<Unary::kReciprocal>>, unsupported_float});
  specs.push_back({"", "Relu", make_kernel<UnaryKernel<Unary::kRelu>>, unsupported_float});
  specs.push_back({"", "Round", make_kernel<UnaryKernel<Unary::kRound>>, unsupported_float});
  specs.push_back({"", "Sigmoid", make_kernel<UnaryKernel<Unary::kSigmoid>>, unsupported_float});
  specs.push_back({"", "Sin", make_kernel<UnaryKernel<Unary::kSin>>, unsupported_float});
  specs.push_back({"", "Sqrt", make_kernel<UnaryKernel<Unary::kSqrt>>, unsupported_float});
  specs.push_back({"", "Tanh", make_kernel<UnaryKernel<Unary::kTanh>>, unsupported_float});
  specs.push_back({"", "Gelu", make_kernel<Gelu>, unsupported_float});
  specs.push_back({"", "Add", make_kernel<ArithmeticKernel<Binary::kAdd>>, unsupported_arithmetic});
  specs.push_back({"", "Div", make_kernel<BinaryKernel<Binary::kDiv>>, unsupported_binary});
  specs.push_back({"", "Max", make_kernel<BinaryKernel<Binary::kMax>>, unsupported_binary});
  specs.push_back({"", "Min", make_kernel<BinaryKernel<Binary::kMin>>, unsupported_binary});
  specs.push_back({"", "Mul", make_kernel<ArithmeticKernel<Binary::kMul>>, unsupported_arithmetic});
  specs.push_back({"", "Pow", make_kernel<BinaryKernel<Binary::kPow>>, unsupported_binary});
  specs.push_back({"", "Sub", make_kernel<ArithmeticKernel<Binary::kSub>>, unsupported_arithmetic});
  specs.push_back({"", "Where", make_kernel<Where>, unsupported_where});
  specs.push_back({"", "Clip", make_kernel<Clip>, unsupported_clip});
  specs.push_back({"", "Equal", make_kernel<Compare<Comparison::kEqual>>, unsupported_equal});
  specs.push_back({"", "Greater", make_kernel<Compare<Comparison::kGreater>>, unsupported_float});  // of masks
  specs.push_back({"", "Cast", make_kernel<Cast>, unsupported_cast});
  specs.push_back({"", "QuantizeLinear", make_kernel<Quantize>, unsupported_quantize});
  specs.push_back({"", "DequantizeLinear", make_kernel<Dequantize>, unsupported_dequantize});
}

}  // namespace sd_ort
