// Candidates of LinearAdd: the generic kernel, tiles by matrix instructions, and the algorithms that cuBLASLt or
// hipBLASLt proposes, best first.
#include "common/blas_lt.h"
#include "common/tunable.h"
#include "operators/linear_add/op.h"

namespace sd_ort {
namespace {

using Params = LinearAddParams;

constexpr int kAlgorithms = 12;

Candidate<Params> library_candidate(int index) {
  return blas_lt_candidate<Params>(index, [](const Params& p) {
    BlasLt::Gemm gemm{p.dtype, p.x, p.weight, p.bias, p.skip, p.y, p.rows, p.inner, p.columns};
    gemm.gelu = p.gelu != 0;
    return gemm;
  });
}

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {generic_candidate(linear_add_launch)};
  all.push_back({"tiles", linear_add_tiles_supports, linear_add_tiles_launch, linear_add_tiles_workspace});
  for (int index = 0; index < kAlgorithms; ++index) all.push_back(library_candidate(index));
  return all;
}

// The first proposal of the library if it supports the call, else tiles if they do.
std::string default_name(const Params& p) {
  const Candidate<Params> first = library_candidate(0);
  return first.is_supported(p) ? first.name : linear_add_tiles_supports(p) ? "tiles" : "generic";
}

}  // namespace

const GpuOp& linear_add_gpu() {
  static const TunableOp<Params> op("LinearAdd", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
