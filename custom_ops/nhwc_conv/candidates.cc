// The ways to run NhwcConv: our plain kernel, and what cuDNN proposes, its favourite first (not on AMD).
#include "common/tunable.h"
#include "nhwc_conv/op.h"
#if !defined(__HIP_PLATFORM_AMD__)
#include "nhwc_conv/cudnn.h"
#endif

namespace sd_ort {
namespace {

#if !defined(__HIP_PLATFORM_AMD__)
constexpr int kPlans = 8;

Candidate<NhwcConvParams> library_candidate(int number) {
  return {"cudnn_" + std::to_string(number),
          [=](const NhwcConvParams& p) { return Cudnn::instance().supports(p, number); },
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return Cudnn::instance().run(p, number, workspace, stream);
          },
          [=](const NhwcConvParams& p) { return Cudnn::instance().workspace_bytes(p, number); }};
}
#endif

std::vector<Candidate<NhwcConvParams>> candidates() {
  std::vector<Candidate<NhwcConvParams>> all;  // filled one by one: GCC 12 breaks on nested braces
  all.push_back({"plain", [](const NhwcConvParams&) { return true; },
                 [](const NhwcConvParams& p, void*, void* stream) { return nhwc_conv_launch(p, stream); }});
#if !defined(__HIP_PLATFORM_AMD__)
  for (int number = 0; number < kPlans; ++number) all.push_back(library_candidate(number));
#endif
  return all;
}

// The library's favourite, where it takes the convolution.
std::string default_name([[maybe_unused]] const NhwcConvParams& p) {
#if !defined(__HIP_PLATFORM_AMD__)
  const Candidate<NhwcConvParams> favourite = library_candidate(0);
  if (favourite.is_supported(p)) return favourite.name;
#endif
  return "plain";
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
