// CustomOp: turns a binding (operators/*/binding.h) into an OrtCustomOp for one execution provider and one element
// type. Only bindings, registry.cc and the provider include this.
//
// A binding is a struct with
//   kName             the operator's name in domain `sd_ort`
//   Params            the plain parameter struct of its kernels (op.h); has a member `DType dtype`
//   kInputs, kOutputs Port arrays; trailing inputs and outputs may be optional
//   attributes(const Attributes&) -> Params      called once per node; sets the attributes
//   infer(Shapes&)                               infers output shapes; dimensions may be symbolic
//   bind(Tensors&, Params&)                      called once per run: checks shapes, sets pointers and sizes
//   cpu(const Params&, const Parallel&)          the CPU kernel
// and optionally
//   kBFloat16         true: the CPU kernel supports bfloat16 as T
//   kMutableAliasX    true: the GPU kernels may write output 0 to the memory of input 0
//   State, kConstant  state of a node between runs, made from constant input kConstant (such as PackedWeights);
//                     Params::packed_weights points to it, null if the input is not constant
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "common/check.h"
#include "common/op.h"
#include "interface.h"
#include "onnxruntime_c_api.h"

namespace sd_ort {

// C API version that the library requests: 22 at most, so that it runs on ONNX Runtime 1.22 even if built with newer
// headers; less with older headers, such as Debian's 1.21.
constexpr uint32_t kApiVersion = ORT_API_VERSION < 22 ? ORT_API_VERSION : 22;

// Set by RegisterCustomOps.
inline const OrtApi* ort_api = nullptr;
inline int ort_minor_version = 0;  // of ONNX Runtime 1.x

inline void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = ort_api->GetErrorMessage(status);
  ort_api->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// Runs body() and converts an exception to an OrtStatus.
template <class F>
OrtStatus* guarded(F&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return ort_api->CreateStatus(ORT_FAIL, error.what());
  }
}

// An input or output. kT has the element type of the registered kernel. kU is float32 or bfloat16, with a registration
// for each. kAny is an input of any type that bind() checks. kFloat8 is float8e4m3fn.
struct Port {
  enum Type { kT, kU, kAny, kFloat8 } type = kT;
  bool optional = false;
};

// ONNX Runtime before 1.24 dereferences the null type of an omitted input before it calls InferOutputShapeFn. A
// trailing omitted input is not in its list. 1.22.2 and 1.23.2 crash, 1.24.1 does not.
constexpr int kInfersOmittedInputs = 24;

// Whether a node can omit an input and have a later one.
template <size_t N>
constexpr bool can_omit_middle_input(const Port (&inputs)[N]) {
  for (size_t i = 0; i + 1 < N; ++i) {
    if (inputs[i].optional) return true;
  }
  return false;
}

class Attributes {
 public:
  explicit Attributes(const OrtKernelInfo* info) : info_(info) {}

  int64_t integer(const char* name, int64_t default_value) const {
    int64_t value = default_value;
    OrtStatus* status = ort_api->KernelInfoGetAttribute_int64(info_, name, &value);
    return ignore(status) ? default_value : value;
  }
  float real(const char* name, float default_value) const {
    float value = default_value;
    OrtStatus* status = ort_api->KernelInfoGetAttribute_float(info_, name, &value);
    return ignore(status) ? default_value : value;
  }
  int64_t required_integer(const char* name) const {
    int64_t value = 0;
    check(ort_api->KernelInfoGetAttribute_int64(info_, name, &value));
    return value;
  }
  std::vector<int64_t> integers(const char* name, std::vector<int64_t> default_value) const {
    size_t count = 0;
    ignore(ort_api->KernelInfoGetAttributeArray_int64(info_, name, nullptr, &count));
    if (count == 0) return default_value;
    std::vector<int64_t> values(count);
    check(ort_api->KernelInfoGetAttributeArray_int64(info_, name, values.data(), &count));
    return values;
  }
  // Whether an input is a constant initializer.
  bool is_constant(size_t index) const {
    int constant = 0;
    const OrtValue* value = nullptr;
    return !ignore(ort_api->KernelInfoGetConstantInput_tensor(info_, index, &constant, &value)) && constant != 0;
  }
  std::string text(const char* name, const std::string& default_value) const {
    size_t bytes = 0;
    ignore(ort_api->KernelInfoGetAttribute_string(info_, name, nullptr, &bytes));
    if (bytes == 0) return default_value;
    std::string value(bytes, '\0');
    check(ort_api->KernelInfoGetAttribute_string(info_, name, value.data(), &bytes));
    return value.c_str();  // without the terminating zero
  }

 private:
  static bool ignore(OrtStatus* status) {
    if (status != nullptr) ort_api->ReleaseStatus(status);
    return status != nullptr;
  }
  const OrtKernelInfo* info_;
};

// A dimension in shape inference: a value, a symbol or unknown.
struct Dim {
  int64_t value = -1;
  std::string symbol;

  bool known() const { return value >= 0; }
};

class Shapes {
 public:
  explicit Shapes(OrtShapeInferContext* context) : context_(context) {
    check(ort_api->ShapeInferContext_GetInputCount(context, &count_));
  }

  // Whether the input is present and its rank is known.
  bool has(size_t index) const { return index < count_ && !input(index).empty(); }

  std::vector<Dim> input(size_t index) const {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(ort_api->ShapeInferContext_GetInputTypeShape(context_, index, &info));
    size_t rank = 0;
    check(ort_api->GetDimensionsCount(info, &rank));
    std::vector<int64_t> values(rank);
    std::vector<const char*> symbols(rank);
    check(ort_api->GetDimensions(info, values.data(), rank));
    check(ort_api->GetSymbolicDimensions(info, symbols.data(), rank));
    std::vector<Dim> dims(rank);
    for (size_t i = 0; i < rank; ++i) dims[i] = {values[i], symbols[i] == nullptr ? "" : symbols[i]};
    return dims;
  }

  // An attribute of the node.
  int64_t required_integer(const char* name) const {
    const OrtOpAttr* attribute = nullptr;
    check(ort_api->ShapeInferContext_GetAttribute(context_, name, &attribute));
    int64_t value = 0;
    size_t bytes = 0;
    check(ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &bytes));
    return value;
  }

  // An attribute of the node, or the default.
  int64_t integer(const char* name, int64_t default_value) const {
    const OrtOpAttr* attribute = nullptr;
    int64_t value = default_value;
    size_t bytes = 0;
    OrtStatus* status = ort_api->ShapeInferContext_GetAttribute(context_, name, &attribute);
    if (status == nullptr) status = ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &bytes);
    if (status != nullptr) ort_api->ReleaseStatus(status);
    return value;
  }

  // Sets the shape of output 0, and its element type to that of input `typed_by` or to `type`. Unknown dimensions get
  // unique symbols: ONNX Runtime would treat two dimensions of -1 as equal and share a buffer between both tensors.
  // Other outputs may be absent, for which ONNX Runtime writes beyond an array; it has no function that counts them.
  // Optimized graphs record their shapes.
  void set_output(std::vector<Dim> dims, size_t typed_by = 0) {
    OrtTensorTypeAndShapeInfo* typed = nullptr;
    ONNXTensorElementDataType type;
    check(ort_api->ShapeInferContext_GetInputTypeShape(context_, typed_by, &typed));
    check(ort_api->GetTensorElementType(typed, &type));
    set_typed_output(std::move(dims), type);
  }
  void set_typed_output(std::vector<Dim> dims, ONNXTensorElementDataType type) {
    static std::atomic<int> unknown{0};
    for (Dim& dim : dims) {
      if (dim.value < 0 && dim.symbol.empty()) dim.symbol = "sd_ort_unknown_" + std::to_string(unknown++);
    }
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(ort_api->CreateTensorTypeAndShapeInfo(&info));
    std::vector<int64_t> values;
    std::vector<const char*> symbols;
    for (const Dim& dim : dims) {
      values.push_back(dim.value);
      symbols.push_back(dim.symbol.c_str());
    }
    OrtStatus* status = ort_api->SetTensorElementType(info, type);
    if (status == nullptr) status = ort_api->SetDimensions(info, values.data(), values.size());
    if (status == nullptr) status = ort_api->SetSymbolicDimensions(info, symbols.data(), symbols.size());
    if (status == nullptr) status = ort_api->ShapeInferContext_SetOutputTypeShape(context_, 0, info);
    ort_api->ReleaseTensorTypeAndShapeInfo(info);
    check(status);
  }

 private:
  OrtShapeInferContext* context_;
  size_t count_ = 0;
};

// An input tensor; data is null if it is absent.
struct Tensor {
  const void* data = nullptr;
  std::vector<int64_t> shape;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;

  explicit operator bool() const { return data != nullptr; }
  bool has_shape(std::initializer_list<int64_t> expected) const {
    return shape.size() == expected.size() && std::equal(shape.begin(), shape.end(), expected.begin());
  }
  // Whether it is one float32 number, or one for each of `channels`.
  bool is_scale_of(int64_t channels) const {
    return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && (size() == 1 || size() == channels);
  }
  // Element count; 0 for an empty tensor, whose other sizes may overflow.
  int64_t size() const {
    int64_t count = 1;
    for (int64_t dim : shape) {
      if (dim == 0) return 0;
    }
    for (int64_t dim : shape) count *= dim;
    return count;
  }
  // Number of rows along the last axis; 0 for an empty tensor.
  int64_t rows() const { return size() == 0 ? 0 : size() / shape.back(); }
  DType dtype() const {
    switch (type) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
        return DType::kFloat32;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
        return DType::kFloat16;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
        return DType::kBFloat16;
      default:
        throw std::invalid_argument("expected a floating-point tensor, got ONNX element type " + std::to_string(type));
    }
  }
};

class Tensors {
 public:
  explicit Tensors(OrtKernelContext* context) : context_(context) {
    check(ort_api->KernelContext_GetInputCount(context, &inputs_));
    check(ort_api->KernelContext_GetOutputCount(context, &outputs_));
  }

  Tensor input(size_t index) const {
    const OrtValue* value = nullptr;
    if (index < inputs_) check(ort_api->KernelContext_GetInput(context_, index, &value));
    if (value == nullptr) return {};
    Tensor tensor;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(ort_api->GetTensorTypeAndShape(value, &info));
    size_t rank = 0;
    check(ort_api->GetDimensionsCount(info, &rank));
    tensor.shape.resize(rank);
    check(ort_api->GetDimensions(info, tensor.shape.data(), rank));
    check(ort_api->GetTensorElementType(info, &tensor.type));
    ort_api->ReleaseTensorTypeAndShapeInfo(info);
    void* data = nullptr;
    check(ort_api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
  }

  // Address of an input; null if it is absent.
  const void* address(size_t index) const {
    const OrtValue* value = nullptr;
    if (index < inputs_) check(ort_api->KernelContext_GetInput(context_, index, &value));
    void* data = nullptr;
    if (value != nullptr) check(ort_api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return data;
  }

  // Allocates an output; returns null if it is not requested.
  void* output(size_t index, const std::vector<int64_t>& shape) {
    OrtValue* value = nullptr;
    if (index < outputs_ && (index >= 32 || (skipped_outputs_ >> index & 1) == 0)) {
      check(ort_api->KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
    }
    if (value == nullptr) return nullptr;
    if (memory_ == nullptr) check(ort_api->GetTensorMemoryInfo(value, &memory_));
    void* data = nullptr;
    check(ort_api->GetTensorMutableData(value, &data));
    const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    require(data != nullptr || empty, "out of device memory for an output");  // ONNX Runtime does not check
    return data;
  }

  // Treats outputs as not requested; one bit for each of the first 32.
  void skip_outputs(uint32_t outputs) { skipped_outputs_ = outputs; }

  // Allocates output `index` in float8, if it is requested. Its scale is the node's attribute `quantized_scale`.
  Float8Output float8_output(size_t index, const std::vector<int64_t>& shape, float scale) {
    void* const data = output(index, shape);
    require(data == nullptr || scale > 0.f, "the output in float8 needs a positive quantized_scale");
    return {data, scale};
  }

  // Memory info of the outputs.
  const OrtMemoryInfo* memory() const { return memory_; }

 private:
  OrtKernelContext* context_;
  size_t inputs_ = 0;
  size_t outputs_ = 0;
  uint32_t skipped_outputs_ = 0;
  const OrtMemoryInfo* memory_ = nullptr;
};

// Scratch memory of one launch from the provider's allocator, whose arena reuses it in stream order.
class Workspace {
 public:
  Workspace(OrtKernelContext* context, const OrtMemoryInfo* memory, size_t bytes) {
    if (bytes == 0) return;
    check(ort_api->KernelContext_GetAllocator(context, memory, &allocator_));
    check(ort_api->AllocatorAlloc(allocator_, bytes, &data_));
    require(data_ != nullptr, "out of device memory for a kernel's workspace");
  }
  ~Workspace() {
    if (data_ != nullptr) ort_api->ReleaseStatus(ort_api->AllocatorFree(allocator_, data_));
    if (allocator_ != nullptr) ort_api->ReleaseAllocator(allocator_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// Functions of the GPU library (interface.h).
struct GpuLibrary {
  decltype(&sd_ort_find_op) find_op;
  decltype(&sd_ort_choose) choose;
  decltype(&sd_ort_workspace_bytes) workspace_bytes;
  decltype(&sd_ort_run) run;
};

// State of a node between runs; empty for most bindings.
template <class Binding, class = void>
struct NodeState {
  explicit NodeState(const Attributes&) {}
  template <class Params>
  void attach(Params&) const {}
};
template <class Binding>
struct NodeState<Binding, std::void_t<typename Binding::State>> {
  explicit NodeState(const Attributes& node) {
    if (node.is_constant(Binding::kConstant)) state = std::make_unique<typename Binding::State>();
  }
  template <class Params>
  void attach(Params& params) const {
    params.packed_weights = state.get();
  }
  std::unique_ptr<typename Binding::State> state;
};

// Base of bindings without attributes whose output 0 has the shape of input 0.
template <class P, void (*kKernel)(const P&, const Parallel&)>
struct BindingBase {
  using Params = P;

  static Params attributes(const Attributes&) { return {}; }
  static void infer(Shapes& shapes) {
    if (shapes.has(0)) shapes.set_output(shapes.input(0));
  }
  static void cpu(const Params& params, const Parallel& parallel) { kKernel(params, parallel); }
};

template <class Binding, class = void>
constexpr bool kSupportsBFloat16 = false;
template <class Binding>
constexpr bool kSupportsBFloat16<Binding, std::void_t<decltype(Binding::kBFloat16)>> = Binding::kBFloat16;

template <class Binding>
class CustomOp : public OrtCustomOp {
 public:
  using Params = typename Binding::Params;

  // `gpu` and `provider` are null for the CPU kernel. `second` is the type of kU. The strings must outlive the session.
  CustomOp(const char* provider, DType dtype, const GpuLibrary* gpu, DType second = DType::kFloat32)
      : OrtCustomOp{}, provider_(provider), dtype_(dtype), second_(second), gpu_(gpu) {
    if (gpu != nullptr) gpu_op_ = gpu->find_op(Binding::kName, sizeof(Params));
    version = kApiVersion;
    GetName = [](const OrtCustomOp*) { return Binding::kName; };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider_; };
    GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Binding::kInputs); };
    GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Binding::kOutputs); };
    GetInputType = [](const OrtCustomOp* op, size_t i) { return self(op).element_type(Binding::kInputs[i]); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) { return self(op).element_type(Binding::kOutputs[i]); };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t i) { return characteristic(Binding::kInputs[i]); };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) { return characteristic(Binding::kOutputs[i]); };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1; };
    if (ort_minor_version >= kInfersOmittedInputs || !can_omit_middle_input(Binding::kInputs)) {
      InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) {
        return guarded([&] {
          Shapes shapes(context);
          Binding::infer(shapes);
        });
      };
    }
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
      return guarded([&] {
        Params params = Binding::attributes(Attributes(info));
        params.dtype = self(op).dtype_;
        *kernel = new Kernel{&self(op), params, NodeState<Binding>(Attributes(info))};
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<Kernel*>(kernel)->compute(context); });
    };
  }

  // Whether the GPU library has this operator with Params of this size.
  bool available() const { return gpu_ == nullptr || gpu_op_ >= 0; }

 private:
  struct Kernel {
    const CustomOp* op;
    Params attributes;
    NodeState<Binding> state;

    void compute(OrtKernelContext* context) const {
      Params params = attributes;
      state.attach(params);
      Tensors tensors(context);
      Binding::bind(tensors, params);
      if (op->gpu_ == nullptr) {
        Binding::cpu(params, Parallel(parallel_for, context));
      } else {
        op->run_on_gpu(context, tensors, params);
      }
    }
  };

  static const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  static OrtCustomOpInputOutputCharacteristic characteristic(const Port& port) {
    return port.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

  ONNXTensorElementDataType element_type(const Port& port) const {
    if (port.type == Port::kAny) return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    if (port.type == Port::kFloat8) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
    const DType type = port.type == Port::kU ? second_ : dtype_;
    return type == DType::kFloat32   ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
           : type == DType::kFloat16 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
                                     : ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
  }

  static void parallel_for(void* context, Parallel::Body body, size_t count, void* body_context) {
    if (count == 1) return body(body_context, 0);
    check(ort_api->KernelContext_ParallelFor(static_cast<OrtKernelContext*>(context), body, count, 0, body_context));
  }

  void run_on_gpu(OrtKernelContext* context, const Tensors& tensors, const Params& params) const {
    void* stream = nullptr;
    check(ort_api->KernelContext_GetGPUComputeStream(context, &stream));
    const int candidate = gpu_->choose(gpu_op_, &params, stream);
    require(candidate >= 0, std::string(Binding::kName) + ": no GPU kernel supports these shapes");
    Workspace workspace(context, tensors.memory(), gpu_->workspace_bytes(gpu_op_, candidate, &params));
    const char* error = gpu_->run(gpu_op_, candidate, &params, workspace.data(), stream);
    require(error == nullptr, std::string(Binding::kName) + ": " + (error == nullptr ? "" : error));
  }

  const char* provider_;
  DType dtype_;
  DType second_;
  const GpuLibrary* gpu_;
  int gpu_op_ = -1;
};

}  // namespace sd_ort
