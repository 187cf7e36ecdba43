// Candidates of LinearSplitGelu: GEMM and gate in two kernels, the GEMM by the generic kernel or tiles of LinearAdd, or
// by the algorithms that cuBLASLt or hipBLASLt proposes, best first; and both in one kernel on Hopper.
#include "common/blas_lt.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/bias_split_gelu/op.h"
#include "operators/linear_add/op.h"
#include "operators/linear_split_gelu/op.h"

namespace sd_ort {
namespace {

using Params = LinearSplitGeluParams;

constexpr int kAlgorithms = 8;
constexpr size_t kAlignment = 256;  // of the library's workspace, which follows the GEMM output
constexpr int64_t kManyRows =
    1024;  // from there on the fused kernel is faster: results/ops_products_attention_sm_90.md

// GEMM of `p` into y; a null y is for queries about the shape.
BlasLt::Gemm gemm(const Params& p, void* y) {
  return {p.dtype, p.x, p.weight, nullptr, nullptr, y, p.rows, p.inner, 2 * p.half};
}

size_t gemm_bytes(const Params& p) { return 2 * p.rows * p.half * size_of(p.dtype); }

const char* gate(const Params& p, const void* x, void* stream) {
  const BiasSplitGeluParams gate{p.dtype, x, p.bias, p.y, p.rows, p.half};
  return bias_split_gelu_launch(gate, bias_split_gelu_default(gate), stream);
}

// As `gemm`.
LinearAddParams linear(const Params& p, void* y) {
  return {p.dtype, p.x, p.weight, nullptr, nullptr, y, p.rows, p.inner, 2 * p.half, 0};
}

size_t gemm_workspace_offset(const Params& p) { return ceil_div(gemm_bytes(p), kAlignment) * kAlignment; }

Candidate<Params> generic() {
  const auto run = [](const Params& p, void* y, void* stream) {
    const char* error = linear_add_launch(linear(p, y), stream);
    return error == nullptr ? gate(p, y, stream) : error;
  };
  return {"generic", [](const Params&) { return true; }, run, gemm_bytes};
}

Candidate<Params> tiles() {
  const auto supports = [](const Params& p) { return linear_add_tiles_supports(linear(p, nullptr)); };
  const auto run = [](const Params& p, void* workspace, void* stream) {
    char* const tiles_workspace = static_cast<char*>(workspace) + gemm_workspace_offset(p);
    const char* error = linear_add_tiles_launch(linear(p, workspace), tiles_workspace, stream);
    return error == nullptr ? gate(p, workspace, stream) : error;
  };
  const auto bytes = [](const Params& p) {
    return gemm_workspace_offset(p) + linear_add_tiles_workspace(linear(p, nullptr));
  };
  return {"tiles", supports, run, bytes};
}

Candidate<Params> library_candidate(int index) {
  const auto supports = [=](const Params& p) { return BlasLt::instance().supports(gemm(p, nullptr), index); };
  const auto run = [=](const Params& p, void* workspace, void* stream) {
    char* const library_workspace = static_cast<char*>(workspace) + gemm_workspace_offset(p);
    const char* error = BlasLt::instance().run(gemm(p, workspace), index, library_workspace, stream);
    return error == nullptr ? gate(p, workspace, stream) : error;
  };
  const auto bytes = [=](const Params& p) {
    return gemm_workspace_offset(p) + BlasLt::instance().workspace_bytes(gemm(p, nullptr), index);
  };
  return {"blas_lt_" + std::to_string(index), supports, run, bytes};
}

#if !SD_ORT_HIP
Candidate<Params> warpgroups() {
  const auto run = [](const Params& p, void*, void* stream) { return linear_split_gelu_warpgroups(p, stream); };
  return {"warpgroups", linear_split_gelu_supports_warpgroups, run};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {generic(), tiles()};
  for (int index = 0; index < kAlgorithms; ++index) all.push_back(library_candidate(index));
#if !SD_ORT_HIP
  all.push_back(warpgroups());
#endif
  return all;
}

// The fused kernel for many rows, else the first proposal of the library if it supports the call, else tiles if they
// do.
std::string default_name(const Params& p) {
#if !SD_ORT_HIP
  if (p.rows >= kManyRows && warpgroups().is_supported(p)) return "warpgroups";
#endif
  for (const Candidate<Params>& candidate : {library_candidate(0), tiles()}) {
    if (candidate.is_supported(p)) return candidate.name;
  }
  return "generic";
}

}  // namespace

const GpuOp& linear_split_gelu_gpu() {
  static const TunableOp<Params> op("LinearSplitGelu", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
