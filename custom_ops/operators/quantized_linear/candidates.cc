// Candidates of QuantizedLinear: the generic kernel; the algorithms that cuBLASLt or hipBLASLt proposes for float8 with
// one scale, best first, gated with the gate's kernel after it; and gated float8 in one kernel on Hopper.
#include "common/blas_lt.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/bias_split_gelu/op.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {
namespace {

using Params = QuantizedLinearParams;

constexpr int kAlgorithms = 8;
constexpr size_t kAlignment = 256;  // of the library's workspace, which follows the GEMM output
constexpr int64_t kManyRows = 1024;

// Units of the current device. A process uses devices of one kind.
Float8Units units() {
  static const Float8Units found = quantized_linear_units();
  return found;
}

// GEMM of `p` into y; if gated its bias is the gate's.
BlasLt::Gemm gemm(const Params& p, void* y) {
  BlasLt::Gemm gemm{p.dtype, p.x, p.weight, p.gated ? nullptr : p.bias, p.skip, y, p.rows, p.inner, p.columns};
  gemm.transposed = true;
  gemm.gelu = p.gelu != 0;
  gemm.float8 = units() == Float8Units::kFnuz ? BlasLt::Float8::kFnuz : BlasLt::Float8::kOcp;
  gemm.weight_scale = p.scale;
  return gemm;
}

size_t gemm_bytes(const Params& p) {
  return p.gated ? ceil_div(p.rows * p.columns * size_of(p.dtype), kAlignment) * kAlignment : 0;
}

// cuBLASLt takes no bias in float32 beside float8, and its sums have fewer bits than float32. It is not asked for an
// output in float8: there the gate's kernel writes it.
bool library_takes(const Params& p) {
  return (p.quantized.data == nullptr || p.gated) && p.dtype != DType::kFloat32 && p.eight_bits == DType::kFloat8 &&
         p.scales == 1 && units() != Float8Units::kNone;
}

Candidate<Params> library_candidate(int index) {
  const auto supports = [=](const Params& p) {
    return library_takes(p) && BlasLt::instance().supports(gemm(p, p.gated ? nullptr : p.y), index);
  };
  const auto run = [=](const Params& p, void* workspace, void* stream) -> const char* {
    char* const library_workspace = static_cast<char*>(workspace) + gemm_bytes(p);
    const char* error = BlasLt::instance().run(gemm(p, p.gated ? workspace : p.y), index, library_workspace, stream);
    if (error != nullptr || !p.gated) return error;
    const BiasSplitGeluParams gate{p.dtype, workspace, p.bias, p.y, p.rows, p.columns / 2, p.quantized};
    return bias_split_gelu_launch(gate, bias_split_gelu_default(gate), stream);
  };
  const auto bytes = [=](const Params& p) {
    return gemm_bytes(p) + BlasLt::instance().workspace_bytes(gemm(p, nullptr), index);
  };
  return {"blas_lt_" + std::to_string(index), supports, run, bytes};
}

#if !SD_ORT_HIP
Candidate<Params> warpgroups() {
  const auto run = [](const Params& p, void*, void* stream) { return quantized_linear_warpgroups(p, stream); };
  return {"warpgroups", quantized_linear_supports_warpgroups, run};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {generic_candidate(quantized_linear_launch)};
  for (int index = 0; index < kAlgorithms; ++index) all.push_back(library_candidate(index));
#if !SD_ORT_HIP
  all.push_back(warpgroups());
#endif
  return all;
}

// The fused kernel for many rows, else the first proposal of the library if it supports the call.
std::string default_name(const Params& p) {
#if !SD_ORT_HIP
  const Candidate<Params> fused = warpgroups();
  const bool supported = fused.is_supported(p);
  if (supported && p.rows >= kManyRows) return fused.name;
#else
  const bool supported = false;
#endif
  const Candidate<Params> first = library_candidate(0);
  return first.is_supported(p) ? first.name : supported ? "warpgroups" : "generic";
}

}  // namespace

const GpuOp& quantized_linear_gpu() {
  static const TunableOp<Params> op("QuantizedLinear", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
