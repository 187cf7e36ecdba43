// The ways to run NhwcConv: our plain kernel, and what cuDNN proposes, its favorite first (not on AMD).
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "nhwc_conv/op.h"
#if !SD_ORT_HIP
#include "nhwc_conv/cudnn.h"
#endif

namespace sd_ort {
namespace {

#if !SD_ORT_HIP
constexpr int kPlans = 16;

Candidate<NhwcConvParams> library_candidate(int number) {
  return {"cudnn_" + std::to_string(number),
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).supports(number); },
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return CudnnConvolution(p).run(number, workspace, stream);
          },
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).workspace_bytes(number); }};
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
  all.push_back({"plain", [](const NhwcConvParams&) { return true; },
                 [](const NhwcConvParams& p, void*, void* stream) { return nhwc_conv_launch(p, stream); }});
  all.push_back(tiles_candidate("tiles", [](const NhwcConvParams&) { return int64_t{1}; }));
  all.push_back(tiles_candidate("split_tiles", nhwc_conv_splits));
#if !SD_ORT_HIP
  for (int number = 0; number < kPlans; ++number) all.push_back(library_candidate(number));
#endif
  return all;
}

// The library's favorite, where it takes the convolution.
std::string default_name([[maybe_unused]] const NhwcConvParams& p) {
#if !SD_ORT_HIP
  const Candidate<NhwcConvParams> favorite = library_candidate(0);
  if (favorite.is_supported(p)) return favorite.name;
#endif
  return nhwc_conv_tiles_supports(p) ? "split_tiles" : "plain";
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
