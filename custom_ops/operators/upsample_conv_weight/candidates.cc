// Candidate of UpsampleConvWeight.
#include "common/tunable.h"
#include "operators/upsample_conv_weight/op.h"

namespace sd_ort {

const GpuOp& upsample_conv_weight_gpu() {
  static const TunableOp<UpsampleConvWeightParams> op("UpsampleConvWeight",
                                                      {generic_candidate(upsample_conv_weight_launch)});
  return op;
}

}  // namespace sd_ort
