// Candidate of WinogradFilters.
#include "common/tunable.h"
#include "operators/winograd_filters/op.h"

namespace sd_ort {

const GpuOp& winograd_filters_gpu() {
  static const TunableOp<WinogradFiltersParams> op("WinogradFilters", {generic_candidate(winograd_filters_launch)});
  return op;
}

}  // namespace sd_ort
