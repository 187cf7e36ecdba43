// Candidates of GroupNorm and SkipGroupNorm. The generic kernel supports every call; single-pass kernels require groups
// that fit in registers; clusters of blocks (NVIDIA, compute capability 9) are best for groups that fit in their LDS.
#include "common/tunable.h"
#include "operators/group_norm/op.h"

namespace sd_ort {
namespace {

std::vector<Candidate<GroupNormParams>> candidates() {
  std::vector<Candidate<GroupNormParams>> all;
  for (const GroupNormConfig& config : group_norm_configs()) {
    all.push_back({config.name(), [config](const GroupNormParams& p) { return group_norm_supports(p, config); },
                   [config](const GroupNormParams& p, void* workspace, void* stream) {
                     return group_norm_launch(p, config, workspace, stream);
                   },
                   [config](const GroupNormParams& p) { return group_norm_workspace(p, config); }});
  }
  return all;
}

std::string default_name(const GroupNormParams& p) { return group_norm_default(p).name(); }

}  // namespace

const GpuOp& group_norm_gpu() {
  static const TunableOp<GroupNormParams> op("GroupNorm", candidates(), default_name);
  return op;
}

const GpuOp& skip_group_norm_gpu() {
  static const TunableOp<GroupNormParams> op("SkipGroupNorm", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
