// Candidates of RotaryEmbedding: one pair per thread, and the pairs of 16 bytes.
#include "common/tunable.h"
#include "operators/rotary_embedding/op.h"

namespace sd_ort {
namespace {

using Params = RotaryEmbeddingParams;

bool supports_vectors(const Params& p) {
  return p.pairs * size_of(p.dtype) % 8 == 0 && are_aligned<8>(p.x, p.cos, p.sin, p.y);
}

Candidate<Params> candidate(const char* name, bool vectors) {
  return {name, [vectors](const Params& p) { return !vectors || supports_vectors(p); },
          [vectors](const Params& p, void*, void* stream) { return rotary_embedding_launch(p, vectors, stream); }};
}

}  // namespace

const GpuOp& rotary_embedding_gpu() {
  static const TunableOp<Params> op("RotaryEmbedding", {candidate("generic", false), candidate("vectors", true)},
                                    [](const Params& p) { return supports_vectors(p) ? "vectors" : "generic"; });
  return op;
}

}  // namespace sd_ort
