// Candidates of SwiGlu: one element per thread, and 16 bytes per thread with three block sizes.
#include "common/tunable.h"
#include "operators/swiglu/op.h"

namespace sd_ort {
namespace {

bool supports_vectors(const SwiGluParams& p) {
  return p.columns * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.gate, p.up, p.y, p.quantized.data);
}

Candidate<SwiGluParams> candidate(const char* name, SwiGluConfig config) {
  return {name, [config](const SwiGluParams& p) { return !config.vectors || supports_vectors(p); },
          [config](const SwiGluParams& p, void*, void* stream) { return swiglu_launch(p, config, stream); }};
}

}  // namespace

const GpuOp& swiglu_gpu() {
  static const TunableOp<SwiGluParams> op(
      "SwiGlu",
      {candidate("generic", {false, 256}), candidate("block_256", {true, 256}), candidate("block_128", {true, 128}),
       candidate("block_512", {true, 512})},
      [](const SwiGluParams& p) { return supports_vectors(p) ? "block_256" : "generic"; });
  return op;
}

}  // namespace sd_ort
