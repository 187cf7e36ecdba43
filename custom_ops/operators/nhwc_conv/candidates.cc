// Candidates of NhwcConv: the generic kernel, implicit GEMM by tiles, the plans that cuDNN proposes (not on AMD) for
// the convolution with or without bias, skip and Relu, and those of NhwcWinograd if the filters were transformed.
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/bias_add/op.h"
#include "operators/nhwc_conv/op.h"
#include "operators/nhwc_conv/winograd.h"
#if !SD_ORT_HIP
#include "operators/nhwc_conv/cudnn.h"
#endif

namespace sd_ort {
namespace {

#if !SD_ORT_HIP
constexpr int kPlans = 16, kSeparatePlans = 6;

Candidate<NhwcConvParams> library_candidate(int index) {
  return {"cudnn_" + std::to_string(index),
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).supports(index); },
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return CudnnConvolution(p).run(index, workspace, stream);
          },
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).workspace_bytes(index); }};
}

// Convolution, then a kernel for bias and skip: at some sizes faster than cuDNN's fused plans
// (results/gpu_experiments.md).
Candidate<NhwcConvParams> separate_candidate(int index) {
  const auto bare = [](NhwcConvParams p) {
    p.bias = p.skip = nullptr;
    return p;
  };
  const auto supports = [=](const NhwcConvParams& p) {
    return p.bias != nullptr && p.relu == 0 && CudnnConvolution(bare(p)).supports(index);
  };
  const auto run = [=](const NhwcConvParams& p, void* workspace, void* stream) {
    const char* error = CudnnConvolution(bare(p)).run(index, workspace, stream);
    if (error != nullptr) return error;
    const BiasAddParams sum{p.dtype, p.y, p.bias, p.skip, p.y, p.pixels(), p.filter_count};
    return bias_add_launch(sum, bias_add_default(sum), stream);
  };
  const auto bytes = [=](const NhwcConvParams& p) { return CudnnConvolution(bare(p)).workspace_bytes(index); };
  return {"cudnn_separate_" + std::to_string(index), supports, run, bytes};
}
#endif

Candidate<NhwcConvParams> tiles_candidate(const char* name, int64_t (*splits)(const NhwcConvParams&)) {
  return {name, nhwc_conv_tiles_supports,
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return nhwc_conv_tiles_launch(p, splits(p), workspace, stream);
          },
          [=](const NhwcConvParams& p) { return nhwc_conv_tiles_workspace(p, splits(p)); }};
}

std::vector<Candidate<NhwcConvParams>> candidates() {
  std::vector<Candidate<NhwcConvParams>> all;  // filled one by one: GCC 12 breaks on nested braces
  all.push_back(generic_candidate(nhwc_conv_launch));
  all.push_back(tiles_candidate("tiles", [](const NhwcConvParams&) { return int64_t{1}; }));
  all.push_back(tiles_candidate("split_tiles", nhwc_conv_splits));
#if !SD_ORT_HIP
  for (int index = 0; index < kPlans; ++index) all.push_back(library_candidate(index));
  for (int index = 0; index < kSeparatePlans; ++index) all.push_back(separate_candidate(index));
#endif
  for (Candidate<NhwcConvParams>& candidate : nhwc_conv_winograd_candidates()) all.push_back(std::move(candidate));
  return all;
}

// NhwcWinograd's default if the filters were transformed, else the first plan of cuDNN if it supports the call.
std::string default_name(const NhwcConvParams& p) {
  if (const std::string name = nhwc_conv_winograd_default(p); !name.empty()) return name;
#if !SD_ORT_HIP
  const Candidate<NhwcConvParams> first = library_candidate(0);
  if (first.is_supported(p)) return first.name;
#endif
  return nhwc_conv_tiles_supports(p) ? "split_tiles" : "generic";
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
