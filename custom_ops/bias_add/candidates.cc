// The ways to run BiasAdd: blocks of three sizes. The first takes any shape.
#include "bias_add/op.h"
#include "common/tunable.h"

namespace sd_ort {
namespace {

Candidate<BiasAddParams> candidate(const char* name, BiasAddConfig config) {
  return {name, [config](const BiasAddParams& p) { return bias_add_supports(p, config); },
          [config](const BiasAddParams& p, void*, void* stream) { return bias_add_launch(p, config, stream); }};
}

}  // namespace

const GpuOp& bias_add_gpu() {
  static const TunableOp<BiasAddParams> op(
      "BiasAdd", {candidate("block_256", {256}), candidate("block_128", {128}), candidate("block_512", {512})});
  return op;
}

}  // namespace sd_ort
