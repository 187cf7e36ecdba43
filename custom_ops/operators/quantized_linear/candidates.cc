// Candidates of QuantizedLinear: the generic kernel; the algorithms that cuBLASLt or hipBLASLt proposes for float8 with
// one scale, best first; NhwcConv's tile kernel for float8, as a 1 x 1 convolution; and gated float8 in one kernel on
// Hopper. Other gates have a kernel of their own after the product, and so has an output in float8, which cuBLASLt
// alone writes itself.
#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "common/tuner.h"
#include "common/vendors/which.h"
#include "operators/bias_split_gelu/op.h"
#include "operators/nhwc_conv/op.h"
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

// Whether a kernel after the library's GEMM writes the outputs.
bool has_second_kernel(const Params& p) { return p.gated || (SD_ORT_HIP && writes_float8(p)); }

// That kernel, for the product `v` (rows, columns): of all but the gate's bias.
const char* run_second_kernel(const Params& p, const void* v, void* stream) {
  if (!p.gated) {
    const QuantizeFloat8Params quantize{p.dtype, v, p.quantized, p.rows * p.columns};
    return quantize_float8_launch(quantize, quantize_float8_supports_vectors(quantize), stream);
  }
  const BiasSplitGeluParams gate{p.dtype, v, p.bias, p.y, p.rows, p.columns / 2, p.quantized};
  return bias_split_gelu_launch(gate, bias_split_gelu_default(gate), stream);
}

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

size_t product_bytes(const Params& p) {
  return ceil_div(p.rows * p.columns * size_of(p.dtype), kAlignment) * kAlignment;
}
size_t gemm_bytes(const Params& p) { return has_second_kernel(p) ? product_bytes(p) : 0; }

bool has_fast_types(const Params& p) {
  return !(writes_float8(p) && p.y != nullptr) && p.dtype != DType::kFloat32 && p.eight_bits == DType::kFloat8;
}

// cuBLASLt takes no bias in float32 beside float8, and its sums have fewer bits than float32.
bool library_takes(const Params& p) { return has_fast_types(p) && p.scales == 1 && units() != Float8Units::kNone; }

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
    return has_second_kernel(p) ? run_second_kernel(p, workspace, stream) : nullptr;
  };
  const auto bytes = [=](const Params& p) {
    return gemm_bytes(p) + BlasLt::instance().workspace_bytes(gemm(p, nullptr), index);
  };
  return {"blas_lt_" + std::to_string(index), supports, run, bytes};
}

// The product as a 1 x 1 convolution of pairs of channels, at the beginning of the workspace if a kernel follows.
NhwcConvParams convolution(const Params& p, void* workspace) {
  void* const y = p.gated || writes_float8(p) ? workspace : p.y;
  NhwcConvParams conv = nhwc_conv_product(p.dtype, p.x, p.weight, y, p.rows, p.inner / 2, p.columns);
  conv.bias = p.gated ? nullptr : p.bias;
  conv.skip = p.skip;
  return conv;
}

Candidate<Params> tiles() {
  const auto product = [](const Params& p) { return p.gated || writes_float8(p) ? product_bytes(p) : 0; };
  const auto supports = [](const Params& p) {
    return has_fast_types(p) && p.rows > 0 && p.inner % 2 == 0 && nhwc_conv_float8_supports(convolution(p, nullptr));
  };
  const auto run = [=](const Params& p, void* workspace, void* stream) -> const char* {
    const NhwcConvParams conv = convolution(p, workspace);
    SD_ORT_RETURN_ERROR(nhwc_conv_float8_launch(conv, {p.scale, p.scales == 1 ? 0 : 1}, p.gelu != 0,
                                                nhwc_conv_splits(conv), static_cast<char*>(workspace) + product(p),
                                                stream));
    return product(p) > 0 ? run_second_kernel(p, workspace, stream) : nullptr;
  };
  const auto bytes = [=](const Params& p) {
    const NhwcConvParams conv = convolution(p, nullptr);
    return product(p) + nhwc_conv_tiles_workspace(conv, nhwc_conv_splits(conv));
  };
  return {"tiles", supports, run, bytes};
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
  all.push_back(tiles());
#if !SD_ORT_HIP
  all.push_back(warpgroups());
#endif
  return all;
}

// The fused kernel for many rows, else the first proposal of the library if it supports the call.
std::string default_name(const Params& p) {
  std::vector<Candidate<Params>> preferred = {library_candidate(0), tiles()};
#if !SD_ORT_HIP
  preferred.insert(p.rows >= kManyRows ? preferred.begin() : preferred.begin() + 1, warpgroups());
#endif
  for (const Candidate<Params>& candidate : preferred) {
    if (candidate.is_supported(p)) return candidate.name;
  }
  return "generic";
}

}  // namespace

const GpuOp& quantized_linear_gpu() {
  static const TunableOp<Params> op("QuantizedLinear", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
