// The operators of domain `sd_ort`: their bindings (an op folder's binding.h) over the GPU launches.
#include "bindings.h"  // made by CMake: the binding.h of every operator in operators.txt
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

DType dtype_of(const OrtKernelInfo* info) {
  Owned<OrtTypeInfo> type(ort_api->ReleaseTypeInfo);
  check(ort_api->KernelInfo_GetInputTypeInfo(info, 0, type.out()));
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  check(ort_api->CastTypeInfoToTensorInfo(type.get(), &tensor));
  Tensor named;
  check(ort_api->GetTensorElementType(tensor, &named.type));
  return named.dtype();
}

// A bit for each of the first 32 outputs that nobody reads.
uint32_t unread_outputs(const OrtKernelInfo* info) {
  size_t count = 0;
  check(ort_api->KernelInfo_GetOutputCount(info, &count));
  uint32_t unread = 0;
  for (size_t i = 1; i < count && i < 32; ++i) {
    if (!provider_of(info).is_read(name_by(ort_api->KernelInfo_GetOutputName, info, i))) unread |= 1u << i;
  }
  return unread;
}

template <class Binding, const GpuOp& (*op)()>
class BoundKernel : public Kernel {
 public:
  explicit BoundKernel(const OrtKernelInfo* info)
      : attributes_(Binding::attributes(Attributes(info))), unread_(unread_outputs(info)) {
    attributes_.dtype = dtype_of(info);
  }

  void compute(Call& call) const override {
    auto params = attributes_;
    call.tensors().leave_out(unread_);
    Binding::bind(call.tensors(), params);
    prepare(params, call);
    run_op(op(), &params, call);
  }

 protected:
  // What a kernel adds to a call's parameters.
  virtual void prepare(typename Binding::Params&, Call&) const {}

 private:
  typename Binding::Params attributes_;
  uint32_t unread_;
};

// NhwcConv, by transformed filters where they are constant and that pays.
class ConvKernel : public BoundKernel<NhwcConvBinding, nhwc_conv_gpu> {
 public:
  explicit ConvKernel(const OrtKernelInfo* info)
      : BoundKernel(info), has_constant_filters_(Attributes(info).is_constant(1)), kept_(provider_of(info).pool()) {}

 protected:
  void prepare(NhwcConvParams& params, Call& call) const override {
    if (has_constant_filters_ && nhwc_conv_pays_winograd(params)) params.transformed = kept_.of(params, call.stream());
  }

 private:
  const bool has_constant_filters_;
  mutable KeptFilters kept_;
};

// Whether a binding says that its kernels may write Y where X lies.
template <class Binding, class = void>
constexpr bool kOverwrites = false;
template <class Binding>
constexpr bool kOverwrites<Binding, std::void_t<decltype(Binding::kOverwritesX)>> = Binding::kOverwritesX;

// Inputs of the binding's type T must all have one type that the kernels take.
template <class Binding>
const char* refuses_types(const Node& node) {
  const auto type = node.input(0).type;
  if (!is_float(type)) return "X is neither float32, float16 nor bfloat16";
  size_t index = 0;
  for (const Port& port : Binding::kInputs) {
    const NodeValue& input = node.input(index++);
    if (!input.there && !port.optional) return "an input is missing";
    if (input.there && port.type == Port::kT && input.type != type) return "its inputs differ in type";
  }
  if (node.has("auto_pad") && node.text("auto_pad", "NOTSET") != "NOTSET") return "its padding is automatic";
  return nullptr;
}

template <class Binding, const GpuOp& (*op)()>
using KernelOf = std::conditional_t<std::is_same_v<Binding, NhwcConvBinding>, ConvKernel, BoundKernel<Binding, op>>;

class QuickGelu : public Kernel {
 public:
  explicit QuickGelu(const OrtKernelInfo* info) : alpha_(Attributes(info).real("alpha", 1.702f)) {}

  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    launched(unary(Unary::kQuickGelu, x.dtype(), x.data, y, x.size(), alpha_, call.stream()));
  }

 private:
  float alpha_;
};

const char* refuses_quick_gelu(const Node& node) {
  return is_float(node.input(0).type) ? nullptr : "X is neither float32, float16 nor bfloat16";
}

}  // namespace

void add_sd_ort_kernels(KernelSpecs& specs) {
#define SD_ORT_OPERATOR(folder, name)                                  \
  specs.push_back({"sd_ort",                                           \
                   name##Binding::kName,                               \
                   make_kernel<KernelOf<name##Binding, folder##_gpu>>, \
                   refuses_types<name##Binding>,                       \
                   {},                                                 \
                   false,                                              \
                   false,                                              \
                   kOverwrites<name##Binding>});
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"
  specs.push_back({"sd_ort", "QuickGelu", make_kernel<QuickGelu>, refuses_quick_gelu});
}

}  // namespace sd_ort
