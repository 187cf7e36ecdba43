// The ways to run NhwcConv: our plain kernel.
#include "common/tunable.h"
#include "nhwc_conv/op.h"

namespace sd_ort {
namespace {

std::vector<Candidate<NhwcConvParams>> candidates() {
  return {{"plain", [](const NhwcConvParams&) { return true; },
           [](const NhwcConvParams& p, void*, void* stream) { return nhwc_conv_launch(p, stream); }}};
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates());
  return op;
}

}  // namespace sd_ort
