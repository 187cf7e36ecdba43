// The ways to run SubpixelShuffle: an element per thread, or 16 bytes.
#include "common/tunable.h"
#include "operators/subpixel_shuffle/op.h"

namespace sd_ort {
namespace {

using Params = SubpixelShuffleParams;

bool always(const Params&) { return true; }
bool takes_vectors(const Params& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.bias, p.y);
}

int element_bytes(const Params& p) { return static_cast<int>(size_of(p.dtype)); }
int vector_bytes(const Params&) { return 16; }

Candidate<Params> candidate(const char* name, bool (*supported)(const Params&), int (*bytes)(const Params&)) {
  return {name, supported,
          [bytes](const Params& p, void*, void* stream) { return subpixel_shuffle_launch(p, bytes(p), stream); }};
}

}  // namespace

const GpuOp& subpixel_shuffle_gpu() {
  static const TunableOp<Params> op(
      "SubpixelShuffle", {candidate("plain", always, element_bytes), candidate("vectors", takes_vectors, vector_bytes)},
      [](const Params& p) { return takes_vectors(p) ? "vectors" : "plain"; });
  return op;
}

}  // namespace sd_ort
