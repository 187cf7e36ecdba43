// Functions of single elements: unary ones, binary ones with broadcasting, Where and Cast.
#include <algorithm>

#include "provider/kernel.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

// The broadcast of a and b (and Where's condition) to `whole`, its neighboring axes joined where they can be.
Broadcast plan(const std::vector<int64_t>& whole, const std::vector<int64_t>& a, const std::vector<int64_t>& b,
               const std::vector<int64_t>& condition) {
  require(whole.size() <= kMostAxes, "a tensor has more than 8 axes");
  int64_t strides[3][kMostAxes];
  set_strides(a, whole, strides[0]);
  set_strides(b, whole, strides[1]);
  set_strides(condition, whole, strides[2]);
  Broadcast made{};
  int64_t* const to[] = {made.a_strides, made.b_strides, made.condition_strides};
  for (size_t axis = 0; axis < whole.size(); ++axis) {
    if (whole[axis] == 1) continue;
    const int last = made.axes - 1;
    bool joins = made.axes > 0;
    for (int k = 0; k < 3; ++k) joins = joins && to[k][last] == whole[axis] * strides[k][axis];
    const int at = joins ? last : made.axes++;
    made.sizes[at] = joins ? made.sizes[at] * whole[axis] : whole[axis];
    for (int k = 0; k < 3; ++k) to[k][at] = strides[k][axis];
  }
  return made;
}

template <Unary op>
class UnaryKernel : public Kernel {
 public:
  explicit UnaryKernel(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    launched(unary(op, x.dtype(), x.data, y, x.size(), 0.f, call.stream()));
  }
};

class Gelu : public Kernel {
 public:
  explicit Gelu(const OrtKernelInfo* info)
      : op_(Attributes(info).text("approximate", "none") == "tanh" ? Unary::kGeluTanh : Unary::kGelu) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    launched(unary(op_, x.dtype(), x.data, y, x.size(), 0.f, call.stream()));
  }

 private:
  Unary op_;
};

template <Binary op>
class BinaryKernel : public Kernel {
 public:
  explicit BinaryKernel(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor a = call.input(0), b = call.input(1);
    const std::vector<int64_t> whole = broadcast_shape({a.shape, b.shape});
    void* y = call.output(0, whole);
    if (count_of(whole) == 0) return;
    launched(binary(op, a.dtype(), plan(whole, a.shape, b.shape, {}), a.data, b.data, y, call.stream()));
  }
};

class Clip : public Kernel {
 public:
  explicit Clip(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), low = call.input(1), high = call.input(2);
    void* y = call.output(0, x.shape);
    launched(clip(x.dtype(), x.data, low.data, high.data, y, x.size(), call.stream()));
  }
};

class Where : public Kernel {
 public:
  explicit Where(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor condition = call.input(0), a = call.input(1), b = call.input(2);
    const std::vector<int64_t> whole = broadcast_shape({condition.shape, a.shape, b.shape});
    void* y = call.output(0, whole);
    if (count_of(whole) == 0) return;
    launched(where(plan(whole, a.shape, b.shape, condition.shape), condition.data, a.data, b.data, y,
                   static_cast<int>(element_bytes(a.type)), call.stream()));
  }
};

// The number type of an element type, or -1.
int number_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return static_cast<int>(Number::kFloat32);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return static_cast<int>(Number::kFloat16);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return static_cast<int>(Number::kBFloat16);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return static_cast<int>(Number::kFloat64);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return static_cast<int>(Number::kInt32);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return static_cast<int>(Number::kInt64);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return static_cast<int>(Number::kUInt8);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return static_cast<int>(Number::kBool);
    default:
      return -1;
  }
}

// Of float numbers, or of int32 or int64 ones as the sampling loop counts with.
template <Binary op>
class NumbersKernel : public BinaryKernel<op> {
 public:
  using BinaryKernel<op>::BinaryKernel;
  void compute(Call& call) const override {
    const Tensor a = call.input(0), b = call.input(1);
    if (is_float(a.type)) return BinaryKernel<op>::compute(call);
    const std::vector<int64_t> whole = broadcast_shape({a.shape, b.shape});
    void* y = call.output(0, whole);
    if (count_of(whole) == 0) return;
    launched(binary_integers(op, static_cast<Number>(number_of(a.type)), plan(whole, a.shape, b.shape, {}), a.data,
                             b.data, y, call.stream()));
  }
};

class Equal : public Kernel {
 public:
  explicit Equal(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor a = call.input(0), b = call.input(1);
    const std::vector<int64_t> whole = broadcast_shape({a.shape, b.shape});
    void* y = call.output(0, whole);
    if (count_of(whole) == 0) return;
    launched(equal(static_cast<Number>(number_of(a.type)), plan(whole, a.shape, b.shape, {}), a.data, b.data, y,
                   call.stream()));
  }
};

class Cast : public Kernel {
 public:
  explicit Cast(const OrtKernelInfo* info)
      : to_(static_cast<ONNXTensorElementDataType>(Attributes(info).required_integer("to"))) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    launched(cast(static_cast<Number>(number_of(x.type)), x.data, static_cast<Number>(number_of(to_)), y, x.size(),
                  call.stream()));
  }

 private:
  ONNXTensorElementDataType to_;
};

const char* refuses_float(const Node& node) {
  return is_float(node.input(0).type) ? nullptr : "X is neither float32, float16 nor bfloat16";
}

const char* refuses_binary(const Node& node) {
  if (node.inputs.size() != 2) return "it has not two inputs";
  return node.input(1).type != node.input(0).type ? "its inputs differ in type" : refuses_float(node);
}

const char* refuses_numbers(const Node& node) {
  const auto type = node.input(0).type;
  const bool whole = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  return whole && node.inputs.size() == 2 ? nullptr : refuses_binary(node);
}

const char* refuses_equal(const Node& node) {
  return number_of(node.input(0).type) >= 0 ? nullptr : "numbers of a type that the provider does not compare";
}

const char* refuses_clip(const Node& node) {
  return node.since_version < 11 ? "bounds as attributes, which opsets before 11 have" : refuses_float(node);
}

const char* refuses_where(const Node& node) {
  return element_bytes(node.input(1).type) == 0 ? "its type has no fixed size" : nullptr;
}

const char* refuses_cast(const Node& node) {
  const bool taken = number_of(node.input(0).type) >= 0 && number_of(node.outputs.at(0).type) >= 0;
  return taken ? nullptr : "from or to a type that the provider does not have";
}

}  // namespace

void add_elementwise_kernels(KernelSpecs& specs) {
  specs.push_back({"", "Abs", make_kernel<UnaryKernel<Unary::kAbs>>, refuses_float});
  specs.push_back({"", "Cos", make_kernel<UnaryKernel<Unary::kCos>>, refuses_float});
  specs.push_back({"", "Erf", make_kernel<UnaryKernel<Unary::kErf>>, refuses_float});
  specs.push_back({"", "Exp", make_kernel<UnaryKernel<Unary::kExp>>, refuses_float});
  specs.push_back({"", "Log", make_kernel<UnaryKernel<Unary::kLog>>, refuses_float});
  specs.push_back({"", "Neg", make_kernel<UnaryKernel<Unary::kNeg>>, refuses_float});
  specs.push_back({"", "Reciprocal", make_kernel<UnaryKernel<Unary::kReciprocal>>, refuses_float});
  specs.push_back({"", "Relu", make_kernel<UnaryKernel<Unary::kRelu>>, refuses_float});
  specs.push_back({"", "Round", make_kernel<UnaryKernel<Unary::kRound>>, refuses_float});
  specs.push_back({"", "Sigmoid", make_kernel<UnaryKernel<Unary::kSigmoid>>, refuses_float});
  specs.push_back({"", "Sin", make_kernel<UnaryKernel<Unary::kSin>>, refuses_float});
  specs.push_back({"", "Sqrt", make_kernel<UnaryKernel<Unary::kSqrt>>, refuses_float});
  specs.push_back({"", "Tanh", make_kernel<UnaryKernel<Unary::kTanh>>, refuses_float});
  specs.push_back({"", "Gelu", make_kernel<Gelu>, refuses_float});
  specs.push_back({"", "Add", make_kernel<NumbersKernel<Binary::kAdd>>, refuses_numbers});
  specs.push_back({"", "Div", make_kernel<BinaryKernel<Binary::kDiv>>, refuses_binary});
  specs.push_back({"", "Max", make_kernel<BinaryKernel<Binary::kMax>>, refuses_binary});
  specs.push_back({"", "Min", make_kernel<BinaryKernel<Binary::kMin>>, refuses_binary});
  specs.push_back({"", "Mul", make_kernel<NumbersKernel<Binary::kMul>>, refuses_numbers});
  specs.push_back({"", "Pow", make_kernel<BinaryKernel<Binary::kPow>>, refuses_binary});
  specs.push_back({"", "Sub", make_kernel<NumbersKernel<Binary::kSub>>, refuses_numbers});
  specs.push_back({"", "Where", make_kernel<Where>, refuses_where});
  specs.push_back({"", "Clip", make_kernel<Clip>, refuses_clip});
  specs.push_back({"", "Equal", make_kernel<Equal>, refuses_equal});
  specs.push_back({"", "Cast", make_kernel<Cast>, refuses_cast});
}

}  // namespace sd_ort
