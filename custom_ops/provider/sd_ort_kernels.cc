// Operators of domain `sd_ort`: their bindings (operators/*/binding.h) with the GPU candidates.
#include "bindings.h"  // written by CMake: includes binding.h of every operator in operators.txt
#include "provider/kernels/kernels.h"
#include "provider/provider.h"
#include "provider/run_op.h"
#include "provider/winograd_filter_cache.h"
#include "provider_bindings.h"

namespace sd_ort {

#define SD_ORT_OPERATOR(folder, name) const GpuOp& folder##_gpu();
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"

namespace {

// Index of the input that has type T: `kTypedBy` of the binding, else 0.
template <class Binding, class = void>
constexpr size_t kTypedBy = 0;
template <class Binding>
constexpr size_t kTypedBy<Binding, std::void_t<decltype(Binding::kTypedBy)>> = Binding::kTypedBy;

DType dtype_of(const OrtKernelInfo* info, size_t input) {
  OrtHandle<OrtTypeInfo> type(ort_api->ReleaseTypeInfo);
  check(ort_api->KernelInfo_GetInputTypeInfo(info, input, type.out()));
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  check(ort_api->CastTypeInfoToTensorInfo(type.get(), &tensor));
  Tensor named;
  check(ort_api->GetTensorElementType(tensor, &named.type));
  return named.dtype();
}

// Returns a bit for each unused output of the first 32.
uint32_t unused_outputs(const OrtKernelInfo* info) {
  size_t count = 0;
  check(ort_api->KernelInfo_GetOutputCount(info, &count));
  uint32_t unused = 0;
  for (size_t i = 0; i < count && i < 32; ++i) {
    if (!provider_of(info).is_used(name_by(ort_api->KernelInfo_GetOutputName, info, i))) unused |= 1u << i;
  }
  return unused;
}

template <class Binding, const GpuOp& (*op)()>
class BoundKernel : public Kernel {
 public:
  explicit BoundKernel(const OrtKernelInfo* info)
      : attributes_(Binding::attributes(Attributes(info))), unused_outputs_(unused_outputs(info)) {
    attributes_.dtype = dtype_of(info, kTypedBy<Binding>);
  }

  void compute(KernelContext& context) const override {
    auto params = attributes_;
    context.tensors().skip_outputs(unused_outputs_);
    Binding::bind(context.tensors(), params);
    prepare(params, context);
    run_op(op(), &params, context);
  }

 protected:
  // Adds parameters that the binding does not set.
  virtual void prepare(typename Binding::Params&, KernelContext&) const {}

 private:
  typename Binding::Params attributes_;
  uint32_t unused_outputs_;
};

// NhwcConv with cached Winograd filters if the filters are constant and Winograd is faster.
class ConvKernel : public BoundKernel<NhwcConvBinding, nhwc_conv_gpu> {
 public:
  explicit ConvKernel(const OrtKernelInfo* info)
      : BoundKernel(info),
        has_constant_filters_(Attributes(info).is_constant(1)),
        filter_cache_(provider_of(info).pool()) {}

 protected:
  void prepare(NhwcConvParams& params, KernelContext& context) const override {
    if (has_constant_filters_ && nhwc_conv_prefers_winograd(params)) {
      params.transformed_filters = filter_cache_.get(params, context.stream());
    }
  }

 private:
  const bool has_constant_filters_;
  mutable WinogradFilterCache filter_cache_;
};

// Whether the kernels of a binding may write output 0 to the memory of input 0.
template <class Binding, class = void>
constexpr bool kMutableAlias = false;
template <class Binding>
constexpr bool kMutableAlias<Binding, std::void_t<decltype(Binding::kMutableAliasX)>> = Binding::kMutableAliasX;

// Inputs of type T must all have the same floating-point type.
template <class Binding>
const char* unsupported_types(const Node& node) {
  if (node.inputs.size() <= kTypedBy<Binding>) return "an input is missing";
  const auto type = node.input(kTypedBy<Binding>).type;
  if (!is_float(type)) return "X is neither float32, float16 nor bfloat16";
  size_t index = 0;
  for (const Port& port : Binding::kInputs) {
    const NodeValue& input = node.input(index++);
    if (!input.exists && !port.optional) return "an input is missing";
    if (input.exists && port.type == Port::kT && input.type != type) return "its inputs differ in type";
  }
  if (node.has("auto_pad") && node.text("auto_pad", "NOTSET") != "NOTSET") return "its auto_pad is not NOTSET";
  return nullptr;
}

template <class Binding, const GpuOp& (*op)()>
using KernelOf = std::conditional_t<std::is_same_v<Binding, NhwcConvBinding>, ConvKernel, BoundKernel<Binding, op>>;

class QuickGelu : public Kernel {
 public:
  explicit QuickGelu(const OrtKernelInfo* info) : alpha_(Attributes(info).real("alpha", 1.702f)) {}

  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    check_launch(unary(Unary::kQuickGelu, x.dtype(), x.data, y, x.size(), alpha_, context.stream()));
  }

 private:
  float alpha_;
};

}  // namespace

void add_sd_ort_kernels(KernelSpecs& specs) {
#define SD_ORT_OPERATOR(folder, name)                                  \
  specs.push_back({"sd_ort",                                           \
                   name##Binding::kName,                               \
                   make_kernel<KernelOf<name##Binding, folder##_gpu>>, \
                   unsupported_types<name##Binding>,                   \
                   {},                                                 \
                   false,                                              \
                   false,                                              \
                   kMutableAlias<name##Binding>});
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"
  specs.push_back({"sd_ort", "QuickGelu", make_kernel<QuickGelu>, unsupported_float});
}

}  // namespace sd_ort
