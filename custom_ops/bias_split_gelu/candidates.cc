// The ways to run BiasSplitGelu: blocks of three sizes. The first takes any shape.
#include "bias_split_gelu/op.h"
#include "common/tunable.h"

namespace sd_ort {
namespace {

Candidate<BiasSplitGeluParams> candidate(const char* name, BiasSplitGeluConfig config) {
  return {name, [config](const BiasSplitGeluParams& p) { return bias_split_gelu_supports(p, config); },
          [config](const BiasSplitGeluParams& p, void*, void* stream) {
            return bias_split_gelu_launch(p, config, stream);
          }};
}

}  // namespace

const GpuOp& bias_split_gelu_gpu() {
  static const TunableOp<BiasSplitGeluParams> op(
      "BiasSplitGelu", {candidate("block_256", {256}), candidate("block_128", {128}), candidate("block_512", {512})});
  return op;
}

}  // namespace sd_ort
