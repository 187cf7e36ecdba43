// The ways to run Softmax: a number at a time and three reads, the same by vectors, and rows held in registers.
#include "common/tunable.h"
#include "softmax/op.h"

namespace sd_ort {
namespace {

bool takes_vectors(const SoftmaxParams& p) {
  constexpr int kVec = 4;
  const bool aligned = p.dtype == DType::kFloat32 ? are_aligned<kVec * 4>(p.weights) : are_aligned<kVec * 2>(p.weights);
  return p.columns % kVec == 0 && are_aligned<kVec * 4>(p.scores) && aligned;
}

bool is_held(const SoftmaxParams& p) { return p.columns <= SoftmaxConfig::kMostHeld; }

}  // namespace

SoftmaxConfig softmax_default(const SoftmaxParams& p) { return {is_held(p), takes_vectors(p)}; }

const GpuOp& softmax_gpu() {
  using Params = SoftmaxParams;
  static const TunableOp<Params> op(
      "Softmax",
      {{"plain", [](const Params&) { return true; },
        [](const Params& p, void*, void* stream) { return softmax_launch(p, {false, false}, stream); }},
       {"three_reads", takes_vectors,
        [](const Params& p, void*, void* stream) { return softmax_launch(p, {false, true}, stream); }},
       {"in_registers", is_held,
        [](const Params& p, void*, void* stream) { return softmax_launch(p, softmax_default(p), stream); }}},
      [](const Params& p) { return is_held(p)         ? "in_registers"
                                   : takes_vectors(p) ? "three_reads"
                                                      : "plain"; });
  return op;
}

}  // namespace sd_ort
