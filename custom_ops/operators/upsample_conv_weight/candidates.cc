// The one way to run UpsampleConvWeight.
#include "common/tunable.h"
#include "operators/upsample_conv_weight/op.h"

namespace sd_ort {
namespace {

using Params = UpsampleConvWeightParams;

// Made by a function: GCC 12 breaks on the nested braces.
Candidate<Params> plain() {
  const auto supports = [](const Params&) { return true; };
  const auto run = [](const Params& p, void*, void* stream) { return upsample_conv_weight_launch(p, stream); };
  return {"plain", supports, run};
}

}  // namespace

const GpuOp& upsample_conv_weight_gpu() {
  static const TunableOp<Params> op("UpsampleConvWeight", {plain()}, [](const Params&) { return "plain"; });
  return op;
}

}  // namespace sd_ort
