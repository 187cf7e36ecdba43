// Candidates of BiasSplitGelu: one element per thread, and 16 bytes per thread with three block sizes.
#include "common/tunable.h"
#include "operators/bias_split_gelu/op.h"

namespace sd_ort {
namespace {

bool supports_vectors(const BiasSplitGeluParams& p) {
  return p.half * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.bias, p.y, p.quantized.data);
}

Candidate<BiasSplitGeluParams> candidate(const char* name, BiasSplitGeluConfig config) {
  return {name, [config](const BiasSplitGeluParams& p) { return !config.vectors || supports_vectors(p); },
          [config](const BiasSplitGeluParams& p, void*, void* stream) {
            return bias_split_gelu_launch(p, config, stream);
          }};
}

}  // namespace

BiasSplitGeluConfig bias_split_gelu_default(const BiasSplitGeluParams& p) { return {supports_vectors(p), 256}; }

const GpuOp& bias_split_gelu_gpu() {
  static const TunableOp<BiasSplitGeluParams> op(
      "BiasSplitGelu",
      {candidate("generic", {false, 256}), candidate("block_256", {true, 256}), candidate("block_128", {true, 128}),
       candidate("block_512", {true, 512})},
      [](const BiasSplitGeluParams& p) { return supports_vectors(p) ? "block_256" : "generic"; });
  return op;
}

}  // namespace sd_ort
