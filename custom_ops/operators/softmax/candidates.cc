// Candidates of Softmax: three reads by element, three reads by vectors, and rows in registers.
#include "common/tunable.h"
#include "operators/softmax/op.h"

namespace sd_ort {
namespace {

bool supports_vectors(const SoftmaxParams& p) {
  constexpr int kVec = 4;
  const bool aligned = p.dtype == DType::kFloat32 ? are_aligned<kVec * 4>(p.weights) : are_aligned<kVec * 2>(p.weights);
  return p.columns % kVec == 0 && are_aligned<kVec * 4>(p.scores) && aligned;
}

bool fits_registers(const SoftmaxParams& p) { return p.columns <= SoftmaxConfig::kMaxColumns; }

std::vector<Candidate<SoftmaxParams>> candidates() {
  using Params = SoftmaxParams;
  std::vector<Candidate<Params>> all;
  all.push_back({"generic", [](const Params&) { return true; },
                 [](const Params& p, void*, void* stream) { return softmax_launch(p, {false, false}, stream); }});
  all.push_back({"three_reads", supports_vectors,
                 [](const Params& p, void*, void* stream) { return softmax_launch(p, {false, true}, stream); }});
  all.push_back({"in_registers", fits_registers,
                 [](const Params& p, void*, void* stream) { return softmax_launch(p, softmax_default(p), stream); }});
  return all;
}

std::string default_name(const SoftmaxParams& p) {
  return fits_registers(p) ? "in_registers" : supports_vectors(p) ? "three_reads" : "generic";
}

}  // namespace

SoftmaxConfig softmax_default(const SoftmaxParams& p) { return {fits_registers(p), supports_vectors(p)}; }

const GpuOp& softmax_gpu() {
  static const TunableOp<SoftmaxParams> op("Softmax", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
