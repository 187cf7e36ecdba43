// Winograd filter transforms of the simulated device, by their definition (winograd_filters/op.h). Other tests run the
// kernels of NhwcWinograd in the kernel emulator.
#pragma once

#include <vector>

#include "operators/nhwc_conv/op.h"
#include "operators/winograd_filters/op.h"

namespace sd_ort {

void simulated_winograd_filters(const WinogradFiltersParams& params);

// Recomputes the filters (filter_count, 3, 3, channels) from `transformed_filters`.
std::vector<char> inverse_winograd_filters(const NhwcConvParams& params);

}  // namespace sd_ort
