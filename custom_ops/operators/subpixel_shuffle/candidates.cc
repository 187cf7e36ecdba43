// Candidates of SubpixelShuffle: one element or 16 bytes per thread.
#include "common/tunable.h"
#include "operators/subpixel_shuffle/op.h"

namespace sd_ort {
namespace {

using Params = SubpixelShuffleParams;

bool supports_vectors(const Params& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.bias, p.y);
}

const char* launch_elements(const Params& p, void* stream) {
  return subpixel_shuffle_launch(p, static_cast<int>(size_of(p.dtype)), stream);
}

const char* launch_vectors(const Params& p, void*, void* stream) { return subpixel_shuffle_launch(p, 16, stream); }

}  // namespace

const GpuOp& subpixel_shuffle_gpu() {
  static const TunableOp<Params> op(
      "SubpixelShuffle",
      {generic_candidate(launch_elements), Candidate<Params>{"vectors", supports_vectors, launch_vectors}},
      [](const Params& p) { return supports_vectors(p) ? "vectors" : "generic"; });
  return op;
}

}  // namespace sd_ort
