// The ways to run BiasAdd: element by element (any shape), or 16 bytes a lane in blocks of two sizes.
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
      "BiasAdd",
      {candidate("scalar_256", {0, 256}), candidate("vector_256", {16, 256}), candidate("vector_512", {16, 512})});
  return op;
}

}  // namespace sd_ort
