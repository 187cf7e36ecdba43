#include "provider/kernel.h"

#include <algorithm>
#include <cstring>

#include "provider/device.h"
#include "provider/kernels/kernels.h"
#include "provider/provider.h"

namespace sd_ort {
namespace {

// Kernels are registered for every opset up to this one; unsupported_reason() rejects those that are not supported.
constexpr int kAnyVersion = 1000;

// Returns the name of a prefetched weight that ONNX Runtime loaded from the file instead, or "".
std::string copied_weight(const OrtKernelInfo* info, const PrefetchedWeights& weights) {
  size_t count = 0;
  check(ort_api->KernelInfo_GetInputCount(info, &count));
  for (size_t i = 0; i < count; ++i) {
    const std::string name = name_by(ort_api->KernelInfo_GetInputName, info, i);
    if (!weights.holds(name)) continue;
    int is_constant = 0;
    const OrtValue* value = nullptr;
    check(ort_api->KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
    const void* data = nullptr;
    if (is_constant != 0) check(ort_api->GetTensorData(value, &data));
    if (!weights.contains(data)) return name;
  }
  return "";
}

// Ends the capture of a failed run. Until then no other use of the stream is allowed, and copies of this thread fail.
void end_failed_capture(device::Stream stream) {
  try {
    if (device::is_capturing(stream)) device::destroy_graph(device::end_capture(stream));
  } catch (const std::runtime_error&) {  // an invalidated capture has no graph
  }
}

void add(OrtKernelRegistry* registry, const KernelSpec& spec) {
  OrtHandle<OrtKernelDefBuilder> builder(ep_api->ReleaseKernelDefBuilder);
  OrtHandle<OrtKernelDef> definition(ep_api->ReleaseKernelDef);
  check(ep_api->CreateKernelDefBuilder(builder.out()));
  check(ep_api->KernelDefBuilder_SetDomain(builder.get(), spec.domain));
  check(ep_api->KernelDefBuilder_SetOperatorType(builder.get(), spec.op_type));
  check(ep_api->KernelDefBuilder_SetSinceVersion(builder.get(), 1, kAnyVersion));
  check(ep_api->KernelDefBuilder_SetExecutionProvider(builder.get(), device::kProvider));
  for (int index : spec.host_inputs) {
    check(ep_api->KernelDefBuilder_SetInputMemType(builder.get(), index, OrtMemTypeCPUInput));
  }
  if (spec.host_output) check(ep_api->KernelDefBuilder_SetOutputMemType(builder.get(), 0, OrtMemTypeCPUOutput));
  const int first = 0;
  if (spec.alias) check(ep_api->KernelDefBuilder_AddInputOutputAliases(builder.get(), &first, &first, 1));
  if (spec.mutable_alias)
    check(ep_api->KernelDefBuilder_AddInputOutputMutableAliases(builder.get(), &first, &first, 1));
  check(ep_api->KernelDefBuilder_Build(builder.get(), definition.out()));
  const auto create = [](void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
    return guarded([&] {
      if (PrefetchedWeights* weights = provider_of(info).weights()) {
        const std::string name = copied_weight(info, *weights);
        if (!name.empty()) weights->reject("ONNX Runtime copied weight '" + name + "'");
        require(!weights->is_rejected(), "the prefetched weights cannot be used");
      }
      *kernel = static_cast<const KernelSpec*>(state)->make(info).release();
    });
  };
  check(ep_api->KernelRegistry_AddKernel(registry, definition.get(), create, const_cast<KernelSpec*>(&spec)));
}

}  // namespace

KernelContext::KernelContext(OrtKernelContext* context) : context_(context), tensors_(context) {
  check(ort_api->KernelContext_GetGPUComputeStream(context, &stream_));
  check(ort_api->KernelContext_GetInputCount(context, &inputs_));
  check(ort_api->KernelContext_GetOutputCount(context, &outputs_));
}

std::vector<int64_t> KernelContext::integers(size_t index) const {
  const Tensor tensor = input(index);
  if (!tensor) return {};
  const int64_t count = tensor.size();
  if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) {
    const int32_t* from = static_cast<const int32_t*>(tensor.data);
    return {from, from + count};
  }
  require(tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "expected int32 or int64 numbers");
  const int64_t* from = static_cast<const int64_t*>(tensor.data);
  return {from, from + count};
}

Kernel::Kernel() : OrtKernelImpl{} {
  ort_version_supported = ORT_API_VERSION;
  Compute = [](OrtKernelImpl* self, OrtKernelContext* raw) noexcept {
    return guarded([&] {
      KernelContext context(raw);
      try {
        static_cast<Kernel*>(self)->compute(context);
      } catch (...) {
        end_failed_capture(context.stream());
        throw;
      }
    });
  };
  Release = [](OrtKernelImpl* self) noexcept { delete static_cast<Kernel*>(self); };
}

void check_launch(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

const KernelSpecs& kernel_specs() {
  static const KernelSpecs all = [] {
    KernelSpecs specs;
    add_sd_ort_kernels(specs);
    add_gemm_kernels(specs);
    add_elementwise_kernels(specs);
    add_movement_kernels(specs);
    add_shape_kernels(specs);
    add_reduction_kernels(specs);
    return specs;
  }();
  return all;
}

const KernelSpec* find_spec(const Node& node) {
  for (const KernelSpec& spec : kernel_specs()) {
    if (node.op_type == spec.op_type && node.domain == spec.domain) return &spec;
  }
  return nullptr;
}

const char* unsupported_reason(const KernelSpec* spec, const Node& node) {
  if (spec == nullptr) return "the provider has no kernel of this operator";
  for (const std::vector<NodeValue>& values : {node.inputs, node.outputs}) {
    for (const NodeValue& value : values) {
      if (value.rank > kMaxAxes) return "a tensor has more than 8 axes";
    }
  }
  return spec->unsupported_reason == nullptr ? nullptr : spec->unsupported_reason(node);
}

const char* unsupported_float(const Node& node) {
  return is_float(node.input(0).type) ? nullptr : "X is neither float32, float16 nor bfloat16";
}

const char* unsupported_dtypes(const Node& node) {
  return node.input(1).type != node.input(0).type ? "its inputs differ in type" : unsupported_float(node);
}

const char* unsupported_elements(const Node& node) {
  return element_bytes(node.input(0).type) == 0 ? "its type has no fixed size" : nullptr;
}

OrtKernelRegistry* create_registry() {
  OrtKernelRegistry* registry = nullptr;
  check(ep_api->CreateKernelRegistry(&registry));
  for (const KernelSpec& spec : kernel_specs()) add(registry, spec);
  return registry;
}

int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

int64_t normalized_axis(int64_t axis, size_t rank) {
  const int64_t counted = axis < 0 ? axis + static_cast<int64_t>(rank) : axis;
  require(counted >= 0 && counted < static_cast<int64_t>(rank), "axis " + std::to_string(axis) + " is out of range");
  return counted;
}

std::vector<int64_t> broadcast_shape(const std::vector<std::vector<int64_t>>& shapes) {
  size_t rank = 0;
  for (const auto& shape : shapes) rank = std::max(rank, shape.size());
  std::vector<int64_t> target(rank, 1);
  for (const auto& shape : shapes) {
    for (size_t i = 0; i < shape.size(); ++i) {
      int64_t& size = target[rank - shape.size() + i];
      require(size == 1 || shape[i] == 1 || size == shape[i], "the shapes do not broadcast");
      if (size == 1) size = shape[i];
    }
  }
  return target;
}

void set_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& target, int64_t* strides) {
  int64_t stride = 1;
  const size_t missing = target.size() - shape.size();
  for (size_t i = target.size(); i-- > 0;) {
    const int64_t size = i < missing ? 1 : shape[i - missing];
    strides[i] = size == 1 ? 0 : stride;
    stride *= size;
  }
}

}  // namespace sd_ort
