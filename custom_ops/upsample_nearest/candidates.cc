// The ways to run UpsampleNearest: blocks of three sizes. The first takes any shape.
#include "common/tunable.h"
#include "upsample_nearest/op.h"

namespace sd_ort {
namespace {

Candidate<UpsampleNearestParams> candidate(const char* name, UpsampleNearestConfig config) {
  return {name, [config](const UpsampleNearestParams& p) { return upsample_nearest_supports(p, config); },
          [config](const UpsampleNearestParams& p, void*, void* stream) {
            return upsample_nearest_launch(p, config, stream);
          }};
}

}  // namespace

const GpuOp& upsample_nearest_gpu() {
  static const TunableOp<UpsampleNearestParams> op(
      "UpsampleNearest", {candidate("block_256", {256}), candidate("block_128", {128}), candidate("block_512", {512})});
  return op;
}

}  // namespace sd_ort
