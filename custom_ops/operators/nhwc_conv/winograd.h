// Candidates of NhwcConv that use transformed_filters. Declared here and defined by nhwc_winograd/candidates.cc, which
// includes NhwcConv for its GEMM kernels, so that the includes are not circular.
#pragma once

#include "common/tunable.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {

std::vector<Candidate<NhwcConvParams>> nhwc_conv_winograd_candidates();

// Returns the name of the default one of them, or "" if the generic kernel is better or the filters are not
// transformed.
std::string nhwc_conv_winograd_default(const NhwcConvParams& params);

}  // namespace sd_ort
