#include "provider/kernel.h"

#include <algorithm>
#include <cstring>

#include "provider/device.h"
#include "provider/kernels/kernels.h"
#include "provider/provider.h"

namespace sd_ort {
namespace {

// A kernel takes every version of its operator up to this one; refuses() says which it does not.
constexpr int kAnyVersion = 1000;

// The name of a weight on the device that ONNX Runtime did not take where it lies, or "": it reads the file's then.
std::string taken_elsewhere(const OrtKernelInfo* info, const Weights& weights) {
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

// Ends the capture of a run that failed: until then nothing but that may be done with the stream, and the thread's
// copies, which wait for it, fail.
void end_failed_capture(device::Stream stream) {
  try {
    if (device::is_capturing(stream)) device::destroy_graph(device::end_capture(stream));
  } catch (const std::runtime_error&) {  // it has no graph
  }
}

void add(OrtKernelRegistry* registry, const KernelSpec& spec) {
  Owned<OrtKernelDefBuilder> builder(ep_api->ReleaseKernelDefBuilder);
  Owned<OrtKernelDef> definition(ep_api->ReleaseKernelDef);
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
  if (spec.in_place) check(ep_api->KernelDefBuilder_AddInputOutputAliases(builder.get(), &first, &first, 1));
  if (spec.overwrites) check(ep_api->KernelDefBuilder_AddInputOutputMutableAliases(builder.get(), &first, &first, 1));
  check(ep_api->KernelDefBuilder_Build(builder.get(), definition.out()));
  const auto create = [](void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel) noexcept {
    return guarded([&] {
      if (Weights* weights = provider_of(info).weights()) {
        const std::string name = taken_elsewhere(info, *weights);
        if (!name.empty()) weights->refuse("it does not take '" + name + "' where it lies");
        require(!weights->is_refused(), "weights on the device cannot be used");
      }
      *kernel = static_cast<const KernelSpec*>(state)->make(info).release();
    });
  };
  check(ep_api->KernelRegistry_AddKernel(registry, definition.get(), create, const_cast<KernelSpec*>(&spec)));
}

}  // namespace

Call::Call(OrtKernelContext* context) : context_(context), tensors_(context) {
  check(ort_api->KernelContext_GetGPUComputeStream(context, &stream_));
  check(ort_api->KernelContext_GetInputCount(context, &inputs_));
  check(ort_api->KernelContext_GetOutputCount(context, &outputs_));
}

std::vector<int64_t> Call::integers(size_t index) const {
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
  Compute = [](OrtKernelImpl* self, OrtKernelContext* context) noexcept {
    return guarded([&] {
      Call call(context);
      try {
        static_cast<Kernel*>(self)->compute(call);
      } catch (...) {
        end_failed_capture(call.stream());
        throw;
      }
    });
  };
  Release = [](OrtKernelImpl* self) noexcept { delete static_cast<Kernel*>(self); };
}

void launched(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

const KernelSpecs& kernel_specs() {
  static const KernelSpecs all = [] {
    KernelSpecs specs;
    add_sd_ort_kernels(specs);
    add_product_kernels(specs);
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

const char* refuses(const KernelSpec* spec, const Node& node) {
  if (spec == nullptr) return "the provider has no kernel of this operator";
  for (const std::vector<NodeValue>& values : {node.inputs, node.outputs}) {
    for (const NodeValue& value : values) {
      if (value.rank > kMostAxes) return "a tensor has more than 8 axes";
    }
  }
  return spec->refuses == nullptr ? nullptr : spec->refuses(node);
}

const char* refuses_float(const Node& node) {
  return is_float(node.input(0).type) ? nullptr : "X is neither float32, float16 nor bfloat16";
}

const char* refuses_elements(const Node& node) {
  return element_bytes(node.input(0).type) == 0 ? "its type has no fixed size" : nullptr;
}

OrtKernelRegistry* create_registry() {
  OrtKernelRegistry* registry = nullptr;
  check(ep_api->CreateKernelRegistry(&registry));
  for (const KernelSpec& spec : kernel_specs()) add(registry, spec);
  return registry;
}

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

int64_t axis_of(int64_t axis, size_t rank) {
  const int64_t counted = axis < 0 ? axis + static_cast<int64_t>(rank) : axis;
  require(counted >= 0 && counted < static_cast<int64_t>(rank), "axis " + std::to_string(axis) + " is out of range");
  return counted;
}

std::vector<int64_t> broadcast_shape(const std::vector<std::vector<int64_t>>& shapes) {
  size_t rank = 0;
  for (const auto& shape : shapes) rank = std::max(rank, shape.size());
  std::vector<int64_t> whole(rank, 1);
  for (const auto& shape : shapes) {
    for (size_t i = 0; i < shape.size(); ++i) {
      int64_t& size = whole[rank - shape.size() + i];
      require(size == 1 || shape[i] == 1 || size == shape[i], "the shapes do not broadcast");
      if (size == 1) size = shape[i];
    }
  }
  return whole;
}

void set_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& whole, int64_t* strides) {
  int64_t stride = 1;
  const size_t missing = whole.size() - shape.size();
  for (size_t i = whole.size(); i-- > 0;) {
    const int64_t size = i < missing ? 1 : shape[i - missing];
    strides[i] = size == 1 ? 0 : stride;
    stride *= size;
  }
}

}  // namespace sd_ort
