// The one way to run WinogradFilters.
#include "common/tunable.h"
#include "operators/winograd_filters/op.h"

namespace sd_ort {
namespace {

using Params = WinogradFiltersParams;

// Made by a function: GCC 12 breaks on the nested braces.
Candidate<Params> plain() {
  const auto supports = [](const Params&) { return true; };
  const auto run = [](const Params& p, void*, void* stream) { return winograd_filters_launch(p, stream); };
  return {"plain", supports, run};
}

}  // namespace

const GpuOp& winograd_filters_gpu() {
  static const TunableOp<Params> op("WinogradFilters", {plain()}, [](const Params&) { return "plain"; });
  return op;
}

}  // namespace sd_ort
