// Operators of the simulated device: each launch queues the operator's CPU kernel on the stream.
#include <cmath>

#include "bindings.h"
#include "common/gpu.h"
#include "common/tunable.h"
#include "operators/nhwc_winograd/op.h"
#include "operators/quantize_float8/op.h"
#include "operators/softmax/op.h"
#include "operators/upsample_conv_weight/op.h"
#include "operators/winograd_filters/op.h"
#include "provider/simulated_winograd.h"
#include "provider_bindings.h"

namespace sd_ort {
namespace {

void run_serially(void*, Parallel::Body body, size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}

// A function because GCC 12 fails on nested braces.
template <class Params>
Candidate<Params> queued(
    const char* name, void (*work)(const Params&),
    std::function<bool(const Params&)> supports = [](const Params&) { return true; }) {
  const auto run = [work](const Params& params, void*, void* stream) -> const char* {
    static_cast<SimulatedStream*>(stream)->launch([work, params] { work(params); });
    return nullptr;
  };
  return {name, supports, run};
}

template <class Binding>
void run_cpu(const typename Binding::Params& params) {
  Binding::cpu(params, Parallel(run_serially, nullptr));
}

template <class Binding>
const GpuOp& simulated_op() {
  static const TunableOp<typename Binding::Params> op(Binding::kName, {queued("cpu", run_cpu<Binding>)});
  return op;
}

bool has_transformed_filters(const NhwcConvParams& params) { return params.transformed_filters != nullptr; }

void run_with_transformed_filters(const NhwcConvParams& params) {
  const std::vector<char> filters = inverse_winograd_filters(params);
  NhwcConvParams direct = params;
  direct.filters = filters.data();
  run_cpu<NhwcConvBinding>(direct);
}

// Uses cached Winograd filters if the provider passes them, as the default candidate on a GPU does.
template <>
const GpuOp& simulated_op<NhwcConvBinding>() {
  static const TunableOp<NhwcConvParams> op(
      "NhwcConv",
      {queued("cpu", run_cpu<NhwcConvBinding>),
       queued("winograd", run_with_transformed_filters, {has_transformed_filters})},
      [](const NhwcConvParams& params) { return has_transformed_filters(params) ? "winograd" : "cpu"; });
  return op;
}

// Operators without a CPU kernel, which only other GPU operators or torch launch, have no candidates.
template <class Params>
std::vector<Candidate<Params>> launched_candidates() {
  return {};
}
// The provider itself launches this one.
template <>
std::vector<Candidate<WinogradFiltersParams>> launched_candidates() {
  return {queued("cpu", simulated_winograd_filters)};
}

}  // namespace

#define SD_ORT_GPU_OPERATOR(folder, name)                                                \
  const GpuOp& folder##_gpu() {                                                          \
    static const TunableOp<name##Params> op(#name, launched_candidates<name##Params>()); \
    return op;                                                                           \
  }
#define SD_ORT_OPERATOR(folder, name) \
  const GpuOp& folder##_gpu() { return simulated_op<name##Binding>(); }
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"

bool nhwc_conv_has_float8() { return true; }

}  // namespace sd_ort
