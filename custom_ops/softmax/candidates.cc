// The one way to run Softmax.
#include "common/tunable.h"
#include "softmax/op.h"

namespace sd_ort {
namespace {

Candidate<SoftmaxParams> candidate() {
  return {"default", [](const SoftmaxParams&) { return true; },
          [](const SoftmaxParams& p, void*, void* stream) { return softmax_launch(p, stream); }};
}

}  // namespace

const GpuOp& softmax_gpu() {
  static const TunableOp<SoftmaxParams> op("Softmax", {candidate()});
  return op;
}

}  // namespace sd_ort
