// Candidates of BiasAdd: one element per thread, and 16 bytes per thread with three block sizes.
#include "common/tunable.h"
#include "operators/bias_add/op.h"

namespace sd_ort {
namespace {

bool supports_vectors(const BiasAddParams& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.bias, p.skip, p.y);
}

Candidate<BiasAddParams> candidate(const char* name, BiasAddConfig config) {
  return {name, [config](const BiasAddParams& p) { return !config.vectors || supports_vectors(p); },
          [config](const BiasAddParams& p, void*, void* stream) { return bias_add_launch(p, config, stream); }};
}

}  // namespace

BiasAddConfig bias_add_default(const BiasAddParams& p) { return {supports_vectors(p), 256}; }

const GpuOp& bias_add_gpu() {
  static const TunableOp<BiasAddParams> op(
      "BiasAdd",
      {candidate("generic", {false, 256}), candidate("block_256", {true, 256}), candidate("block_128", {true, 128}),
       candidate("block_512", {true, 512})},
      [](const BiasAddParams& p) { return supports_vectors(p) ? "block_256" : "generic"; });
  return op;
}

}  // namespace sd_ort
