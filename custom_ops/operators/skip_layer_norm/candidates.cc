// Candidates of SkipLayerNormalization: rows of any length in two passes, and rows in the registers of 8 to 256
// threads.
#include "common/tunable.h"
#include "operators/skip_layer_norm/op.h"

namespace sd_ort {
namespace {

using Params = SkipLayerNormParams;

Candidate<Params> candidate(const char* name, SkipLayerNormConfig config) {
  return {name, [config](const Params& p) { return config.lanes == 0 || skip_layer_norm_items(p, config.lanes) > 0; },
          [config](const Params& p, void*, void* stream) { return skip_layer_norm_launch(p, config, stream); }};
}

const char* default_name(const Params& p) {
  switch (skip_layer_norm_lanes(p)) {
    case 0:
      return "two_pass";
    case 8:
      return "lanes_8";
    case 16:
      return "lanes_16";
    case 32:
      return "lanes_32";
    default:
      return "block_per_row";
  }
}

}  // namespace

const GpuOp& skip_layer_norm_gpu() {
  static const TunableOp<Params> op(
      "SkipLayerNormalization",
      {candidate("two_pass", {0}), candidate("lanes_8", {8}), candidate("lanes_16", {16}), candidate("lanes_32", {32}),
       candidate("block_per_row", {SkipLayerNormConfig::kBlock})},
      default_name);
  return op;
}

}  // namespace sd_ort
