// Candidates of QuantizedLinear: the generic kernel; the algorithms that cuBLASLt or hipBLASLt proposes for float8 with
// one scale, best first, gated with the gate's kernel after it; and gated float8 in one kernel on Hopper. cuBLASLt
// writes an output in float8 itself, hipBLASLt's is rounded after it.
#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "common/tuner.h"
#include "common/vendors/which.h"
#include "operators/bias_split_gelu/op.h"
#include "operators/quantize_float8/op.h"
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

bool writes_float8(const Params& p) { return p.quantized.data != nullptr && !p.gated; }

// Whether a kernel after the GEMM writes the outputs.
bool has_second_kernel(const Params& p) { return p.gated || (SD_ORT_HIP && writes_float8(p)); }

// GEMM of `p`, into the workspace if a second kernel follows; if gated its bias is the gate's.
BlasLt::Gemm gemm(const Params& p, void* workspace) {
  void* const y = has_second_kernel(p) ? workspace : writes_float8(p) ? p.quantized.data : p.y;
  BlasLt::Gemm gemm{p.dtype, p.x, p.weight, p.gated ? nullptr : p.bias, p.skip, y, p.rows, p.inner, p.columns};
  gemm.transposed = true;
  gemm.gelu = p.gelu != 0;
  gemm.float8 = units() == Float8Units::kFnuz ? BlasLt::Float8::kFnuz : BlasLt::Float8::kOcp;
  gemm.weight_scale = p.scale;
  if (writes_float8(p) && !has_second_kernel(p)) gemm.y_factor = device_number(1.f / p.quantized.scale);
  return gemm;
}

size_t gemm_bytes(const Params& p) {
  return has_second_kernel(p) ? ceil_div(p.rows * p.columns * size_of(p.dtype), kAlignment) * kAlignment : 0;
}

// cuBLASLt takes no bias in float32 beside float8, and its sums have fewer bits than float32.
bool library_takes(const Params& p) {
  return !(writes_float8(p) && p.y != nullptr) && p.dtype != DType::kFloat32 && p.eight_bits == DType::kFloat8 &&
         p.scales == 1 && units() != Float8Units::kNone;
}

Candidate<Params> library_candidate(int index) {
  const auto supports = [=](const Params& p) {
    if (!library_takes(p)) return false;
    const BlasLt::Gemm proposed = gemm(p, nullptr);
    // Without memory for its factor the library would write Y in T, beyond the output.
    const bool lacks_factor = writes_float8(p) && !has_second_kernel(p) && proposed.y_factor == nullptr;
    return !lacks_factor && BlasLt::instance().supports(proposed, index);
  };
  const auto run = [=](const Params& p, void* workspace, void* stream) -> const char* {
    char* const library_workspace = static_cast<char*>(workspace) + gemm_bytes(p);
    SD_ORT_RETURN_ERROR(BlasLt::instance().run(gemm(p, workspace), index, library_workspace, stream));
    if (!has_second_kernel(p)) return nullptr;
    if (!p.gated) {
      const QuantizeFloat8Params quantize{p.dtype, workspace, p.quantized, p.rows * p.columns};
      return quantize_float8_launch(quantize, quantize_float8_supports_vectors(quantize), stream);
    }
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
