// The ways to run SkipLayerNormalization. The first takes any shape, by the kernel that its row length suits.
#include "common/tunable.h"
#include "skip_layer_norm/op.h"

namespace sd_ort {
namespace {

Candidate<SkipLayerNormParams> candidate(const char* name, SkipLayerNormConfig config) {
  return {name, [config](const SkipLayerNormParams& p) { return skip_layer_norm_supports(p, config); },
          [config](const SkipLayerNormParams& p, void*, void* stream) {
            return skip_layer_norm_launch(p, config, stream);
          }};
}

}  // namespace

const GpuOp& skip_layer_norm_gpu() {
  static const TunableOp<SkipLayerNormParams> op(
      "SkipLayerNormalization",
      {candidate("default", {0}), candidate("lanes_8", {8}), candidate("lanes_16", {16}), candidate("lanes_32", {32}),
       candidate("block_a_row", {256}), candidate("two_reads", {-1})});
  return op;
}

}  // namespace sd_ort
