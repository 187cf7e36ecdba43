// Candidates of QuantizeFloat8: one element per thread, and 16 bytes of x per thread.
#include "common/tunable.h"
#include "operators/quantize_float8/op.h"

namespace sd_ort {
namespace {

using Params = QuantizeFloat8Params;

Candidate<Params> candidate(const char* name, bool vectors) {
  return {name, [vectors](const Params& p) { return !vectors || quantize_float8_supports_vectors(p); },
          [vectors](const Params& p, void*, void* stream) { return quantize_float8_launch(p, vectors, stream); }};
}

}  // namespace

bool quantize_float8_supports_vectors(const Params& p) {
  return p.count * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.quantized.data);
}

const GpuOp& quantize_float8_gpu() {
  static const TunableOp<Params> op(
      "QuantizeFloat8", {candidate("generic", false), candidate("vectors", true)},
      [](const Params& p) { return quantize_float8_supports_vectors(p) ? "vectors" : "generic"; });
  return op;
}

}  // namespace sd_ort
