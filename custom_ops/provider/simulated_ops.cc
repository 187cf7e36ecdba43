// The operators on the host vendor: behind each GPU launch stands the operator's CPU kernel, queued on the stream.
#include <cmath>

#include "bindings.h"
#include "common/gpu.h"
#include "common/tunable.h"
#include "operators/nhwc_winograd/op.h"
#include "operators/softmax/op.h"
#include "operators/upsample_conv_weight/op.h"
#include "operators/winograd_filters/op.h"
#include "provider/simulated_winograd.h"
#include "provider_bindings.h"

namespace sd_ort {
namespace {

void run_in_turn(void*, Parallel::Body body, size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}

// Made by a function: GCC 12 breaks on the nested braces.
template <class Params>
Candidate<Params> queued(
    const char* name, void (*work)(const Params&),
    std::function<bool(const Params&)> supports = [](const Params&) { return true; }) {
  const auto run = [work](const Params& params, void*, void* stream) -> const char* {
    static_cast<HostStream*>(stream)->launch([work, params] { work(params); });
    return nullptr;
  };
  return {name, supports, run};
}

template <class Binding>
void run_cpu(const typename Binding::Params& params) {
  Binding::cpu(params, Parallel(run_in_turn, nullptr));
}

template <class Binding>
const GpuOp& host_op() {
  static const TunableOp<typename Binding::Params> op(Binding::kName, {queued("cpu", run_cpu<Binding>)});
  return op;
}

bool is_transformed(const NhwcConvParams& params) { return params.transformed != nullptr; }

void run_transformed(const NhwcConvParams& params) {
  const std::vector<char> filters = host_filters_back(params);
  NhwcConvParams plain = params;
  plain.filters = filters.data();
  run_cpu<NhwcConvBinding>(plain);
}

// Also by the filters that the provider transformed and keeps, as a GPU's default is.
template <>
const GpuOp& host_op<NhwcConvBinding>() {
  static const TunableOp<NhwcConvParams> op(
      "NhwcConv", {queued("cpu", run_cpu<NhwcConvBinding>), queued("winograd", run_transformed, {is_transformed})},
      [](const NhwcConvParams& params) { return is_transformed(params) ? "winograd" : "cpu"; });
  return op;
}

// What other operators launch, or torch alone, and the host's do not.
template <class Params>
std::vector<Candidate<Params>> launched_by_others() {
  return {};
}
// But for what the provider itself launches.
template <>
std::vector<Candidate<WinogradFiltersParams>> launched_by_others() {
  return {queued("cpu", host_winograd_filters)};
}

}  // namespace

#define SD_ORT_GPU_OPERATOR(folder, name)                                               \
  const GpuOp& folder##_gpu() {                                                         \
    static const TunableOp<name##Params> op(#name, launched_by_others<name##Params>()); \
    return op;                                                                          \
  }
#define SD_ORT_OPERATOR(folder, name) \
  const GpuOp& folder##_gpu() { return host_op<name##Binding>(); }
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"

}  // namespace sd_ort
