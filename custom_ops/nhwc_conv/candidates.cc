// The ways to run NhwcConv: what cuDNN proposes, its favourite first (not on AMD), and our plain kernel.
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
  std::vector<Candidate<NhwcConvParams>> all;
#if !defined(__HIP_PLATFORM_AMD__)
  for (int number = 0; number < kPlans; ++number) all.push_back(library_candidate(number));
#endif
  all.push_back({"plain", [](const NhwcConvParams&) { return true; },
                 [](const NhwcConvParams& p, void*, void* stream) { return nhwc_conv_launch(p, stream); }});
  return all;
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates());
  return op;
}

}  // namespace sd_ort
