// The ways to run NhwcConv: our plain kernel.
#include "common/tunable.h"
#include "nhwc_conv/op.h"

namespace sd_ort {
namespace {

std::vector<Candidate<NhwcConvParams>> candidates() {
  std::vector<Candidate<NhwcConvParams>> all;  // filled one by one: GCC 12 breaks on nested braces
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
