// The operators on the host vendor: behind each GPU launch stands the operator's CPU kernel, queued on the stream.
#include <cmath>

#include "bindings.h"
#include "common/gpu.h"
#include "common/tunable.h"
#include "doubled_weight/op.h"
#include "nhwc_winograd/op.h"
#include "provider_bindings.h"
#include "softmax/op.h"
#include "winograd_filters/op.h"

namespace sd_ort {
namespace {

void run_in_turn(void*, Parallel::Body body, size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}

// Made by a function: GCC 12 breaks on the nested braces.
template <class Binding>
Candidate<typename Binding::Params> candidate() {
  using Params = typename Binding::Params;
  const auto supports = [](const Params&) { return true; };
  const auto run = [](const Params& params, void*, void* stream) -> const char* {
    static_cast<HostStream*>(stream)->launch([params] { Binding::cpu(params, Parallel(run_in_turn, nullptr)); });
    return nullptr;
  };
  return {"cpu", supports, run};
}

template <class Binding>
const GpuOp& host_op() {
  static const TunableOp<typename Binding::Params> op(Binding::kName, {candidate<Binding>()});
  return op;
}

}  // namespace

// What other operators launch, or torch alone, and the host's do not.
#define SD_ORT_GPU_OPERATOR(folder, name)               \
  const GpuOp& folder##_gpu() {                         \
    static const TunableOp<name##Params> op(#name, {}); \
    return op;                                          \
  }
#define SD_ORT_OPERATOR(folder, name) \
  const GpuOp& folder##_gpu() { return host_op<name##Binding>(); }
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"

}  // namespace sd_ort
