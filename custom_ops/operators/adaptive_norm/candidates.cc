// Candidates of AdaptiveNorm: a block per row by elements or 16 bytes, 16 threads per row, for heads, and 128 threads
// that hold their row in registers.
#include "common/tunable.h"
#include "operators/adaptive_norm/op.h"

namespace sd_ort {
namespace {

using Params = AdaptiveNormParams;

bool supports_vectors(const Params& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 &&
         are_aligned<16>(p.x, p.scale, p.shift, p.gate, p.skip, p.y, p.sum, p.quantized.data);
}

Candidate<Params> candidate(const char* name, AdaptiveNormConfig config) {
  const auto supports = [config](const Params& p) {
    const bool is_short = p.channels * static_cast<int64_t>(size_of(p.dtype)) <= kAdaptiveNormRegisterBytes;
    return !config.vectors || (supports_vectors(p) && (config.lanes != 128 || is_short));
  };
  return {name, supports,
          [config](const Params& p, void*, void* stream) { return adaptive_norm_launch(p, config, stream); }};
}

// 16 threads hold rows of up to 1 KiB in four accesses each.
const char* default_name(const Params& p) {
  if (!supports_vectors(p)) return "generic";
  const int64_t bytes = p.channels * static_cast<int64_t>(size_of(p.dtype));
  return bytes <= 1024 ? "lanes_16" : bytes <= kAdaptiveNormRegisterBytes ? "registers" : "block_per_row";
}

}  // namespace

const GpuOp& adaptive_norm_gpu() {
  static const TunableOp<Params> op("AdaptiveNorm",
                                    {candidate("generic", {false, 256}), candidate("lanes_16", {true, 16}),
                                     candidate("block_per_row", {true, 256}), candidate("registers", {true, 128})},
                                    default_name);
  return op;
}

}  // namespace sd_ort
