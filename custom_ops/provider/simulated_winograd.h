// Winograd's filters on the host vendor, by their definition (winograd_filters/op.h): what tests of the provider see of
// NhwcWinograd, whose kernels run on emulated lanes elsewhere.
#pragma once

#include <vector>

#include "operators/nhwc_conv/op.h"
#include "operators/winograd_filters/op.h"

namespace sd_ort {

void host_winograd_filters(const WinogradFiltersParams& params);

// A convolution's filters, (filter_count, 3, 3, channels), out of its `transformed` ones and of nothing else.
std::vector<char> host_filters_back(const NhwcConvParams& params);

}  // namespace sd_ort
