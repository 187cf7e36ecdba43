// The ways to run GroupNorm and SkipGroupNorm. The first takes any shape; the one-read kernels take groups that fit in
// registers: `block` threads times `registers` of them hold `groups` groups.
#include "common/tunable.h"
#include "group_norm/op.h"

namespace sd_ort {
namespace {

Candidate<GroupNormParams> candidate(std::string name, GroupNormConfig config) {
  return {std::move(name), [config](const GroupNormParams& p) { return group_norm_supports(p, config); },
          [config](const GroupNormParams& p, void* workspace, void* stream) {
            return group_norm_launch(p, config, workspace, stream);
          },
          [config](const GroupNormParams& p) { return group_norm_workspace(p, config); }};
}

std::vector<Candidate<GroupNormParams>> candidates() {
  std::vector<Candidate<GroupNormParams>> all = {candidate("default", {GroupNormConfig::kDefault, 0, 0, 0}),
                                                 candidate("two_reads", {GroupNormConfig::kTwoReads, 0, 0, 0})};
  for (GroupNormConfig config : kOneReadConfigs) {
    for (int groups : {1, 2, 4}) {
      config.groups_per_block = groups;
      all.push_back(candidate("one_read_" + std::to_string(config.block) + "x" + std::to_string(config.registers) +
                                  "_g" + std::to_string(groups),
                              config));
    }
  }
  return all;
}

}  // namespace

const GpuOp& group_norm_gpu() {
  static const TunableOp<GroupNormParams> op("GroupNorm", candidates());
  return op;
}

const GpuOp& skip_group_norm_gpu() {
  static const TunableOp<GroupNormParams> op("SkipGroupNorm", candidates());
  return op;
}

}  // namespace sd_ort
