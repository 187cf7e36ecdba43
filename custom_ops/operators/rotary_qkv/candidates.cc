// Candidates of RotaryQkv: a thread per pair, and 8 or 16 threads per head with the pairs of 16 bytes each.
#include "common/tunable.h"
#include "operators/rotary_qkv/op.h"

namespace sd_ort {
namespace {

using Params = RotaryQkvParams;

bool supports_lanes(const Params& p, int lanes) {
  const int64_t bytes = p.pairs * static_cast<int64_t>(size_of(p.dtype));
  return lanes == 0 || (bytes % 8 == 0 && bytes <= 8 * lanes &&
                        are_aligned<8>(p.first.qkv, p.first.q_scale, p.first.k_scale, p.second.qkv, p.second.q_scale,
                                       p.second.k_scale, p.cos, p.sin, p.y));
}

Candidate<Params> candidate(const char* name, int lanes) {
  return {name, [lanes](const Params& p) { return supports_lanes(p, lanes); },
          [lanes](const Params& p, void*, void* stream) { return rotary_qkv_launch(p, lanes, stream); }};
}

const char* default_name(const Params& p) {
  return supports_lanes(p, 8) ? "lanes_8" : supports_lanes(p, 16) ? "lanes_16" : "generic";
}

}  // namespace

const GpuOp& rotary_qkv_gpu() {
  static const TunableOp<Params> op(
      "RotaryQkv", {candidate("generic", 0), candidate("lanes_8", 8), candidate("lanes_16", 16)}, default_name);
  return op;
}

}  // namespace sd_ort
