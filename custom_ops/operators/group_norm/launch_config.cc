// How a GroupNorm call is cut up: chosen on the host from its shape and a configuration.
#include <algorithm>
#include <climits>
#include <iterator>

#include "operators/group_norm/op.h"

namespace sd_ort {
namespace {

// The sizes that one read is compiled in. They hold 24, 88, 168 and 96 KB.
constexpr GroupNormConfig kOneReadConfigs[] = {{GroupNormConfig::kOneRead, 256, 24, 1},
                                               {GroupNormConfig::kOneRead, 512, 44, 1},
                                               {GroupNormConfig::kOneRead, 512, 84, 1},
                                               {GroupNormConfig::kOneRead, 1024, 24, 1}};

// Two blocks per multiprocessor, one with all LDS, the same for whole pixels, four with less each. Stable Diffusion's
// spans are 5 or 10 times 32 bytes, which 320 and 640 threads take without a rest.
constexpr GroupNormConfig kClusterConfigs[] = {{GroupNormConfig::kCluster, 320, 0, 0, 128, 96 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 128, 200 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 512, 200 * 1024},
                                               {GroupNormConfig::kCluster, 320, 0, 0, 64, 48 * 1024}};

bool takes_bytes(const GroupNormParams& p, int bytes) {
  return bytes == static_cast<int>(size_of(p.dtype)) ||
         (p.channels * size_of(p.dtype) % bytes == 0 && are_aligned<16>(p.x, p.skip, p.y, p.sum));
}

// Widest access, at most `limit` bytes, that fits a span of groups: no slice crosses the span's end or touches three
// groups.
int widest_access(const GroupNormParams& p, int64_t span, int limit) {
  const int size = static_cast<int>(size_of(p.dtype));
  for (int bytes = limit; bytes > size; bytes /= 2) {
    if (span * size % bytes == 0 && bytes / size <= p.channels / p.groups && takes_bytes(p, bytes)) return bytes;
  }
  return size;
}

int64_t items_needed(const GroupNormParams& p, const GroupNormConfig& config, int vector_bytes) {
  const int64_t span = config.groups_per_block * (p.channels / p.groups);
  const int64_t slices = span * size_of(p.dtype) / vector_bytes;
  return slices > config.block ? INT64_MAX : ceil_div(p.spatial, config.block / slices);
}

GroupNormPlan plan_one_read(const GroupNormParams& p, const GroupNormConfig& config) {
  GroupNormPlan plan;
  if (!p.channels_last || p.groups % config.groups_per_block != 0) return plan;
  if (p.spatial * p.channels > INT32_MAX) return plan;  // offsets within a sample are 32 bits wide
  const int bytes = widest_access(p, config.groups_per_block * (p.channels / p.groups), 16);
  // narrow accesses are not worth instances with many of them
  if ((bytes == 2 && config.block == 512) || (bytes < 16 && config.registers == 84)) return plan;
  if (items_needed(p, config, bytes) > group_norm_items(config.registers, bytes)) return plan;
  plan.vector_bytes = bytes;
  plan.groups_per_block = config.groups_per_block;
  plan.block = config.block;
  plan.registers = config.registers;
  return plan;
}

// Spans as wide as a block takes; chunks enough to fill a large GPU, few enough that merging their moments is cheap.
GroupNormPlan plan_two_reads(const GroupNormParams& p) {
  constexpr int64_t kBlocks = 384, kMaxChunks = 256, kPixelsPerThread = 8;
  GroupNormPlan plan;
  const int64_t channels_per_group = p.channels / p.groups;
  const int size = static_cast<int>(size_of(p.dtype));
  for (int64_t groups = std::min<int64_t>(p.groups, GroupNormPlan::kMaxGroupsPerBlock); groups > 0; --groups) {
    if (p.groups % groups != 0) continue;
    const int bytes = widest_access(p, groups * channels_per_group, 16);
    const int64_t slices = groups * channels_per_group * size / bytes;
    if (slices > GroupNormPlan::kTwoReadBlock) continue;
    const int64_t rows = GroupNormPlan::kTwoReadBlock / slices;
    const int64_t filling = ceil_div(kBlocks, p.batch * (p.groups / groups));
    const int64_t chunks = std::min({filling, kMaxChunks, ceil_div(p.spatial, rows * kPixelsPerThread)});
    plan.vector_bytes = bytes;
    plan.groups_per_block = static_cast<int>(groups);
    plan.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, chunks));
    plan.chunks = static_cast<int>(ceil_div(p.spatial, plan.pixels_per_chunk));
    break;
  }
  return plan;
}

// The narrowest span of whole groups with the configuration's bytes per pixel, in whole sectors of 32 bytes if there
// are such; the smallest cluster whose LDS holds all its pixels and that, with the others, fills a large GPU.
GroupNormPlan plan_cluster(const GroupNormParams& p, const GroupNormConfig& config) {
  constexpr int64_t kFilling = 100, kFewItems = 2;
  GroupNormPlan plan;
  if (!p.channels_last || p.spatial * p.channels > INT32_MAX || group_norm_largest_cluster() == 0) return plan;
  const int64_t channels_per_group = p.channels / p.groups, size = static_cast<int64_t>(size_of(p.dtype));
  int64_t groups = 0;
  for (bool whole_sectors : {true, false}) {
    for (int64_t g = 1; g <= std::min<int64_t>(p.groups, GroupNormPlan::kMaxClusterGroups) && groups == 0; ++g) {
      const int64_t bytes = g * channels_per_group * size;
      if (p.groups % g == 0 && bytes >= config.span_bytes && (!whole_sectors || bytes % 32 == 0)) groups = g;
    }
  }
  if (groups == 0) groups = p.groups <= GroupNormPlan::kMaxClusterGroups ? p.groups : 1;
  const int bytes = widest_access(p, groups * channels_per_group, 16);
  const int64_t slices = groups * channels_per_group * size / bytes;
  if (bytes < 4 || slices > config.block) return plan;
  const int64_t rows = config.block / slices, capacity = config.lds_bytes / (config.block * bytes);
  int cluster = 1;
  for (; cluster < group_norm_largest_cluster(); cluster *= 2) {
    const int64_t items = ceil_div(ceil_div(p.spatial, cluster), rows);
    const bool fills = p.batch * (p.groups / groups) * cluster >= kFilling || items <= kFewItems;
    if (items <= capacity && fills) break;
  }
  plan.vector_bytes = bytes;
  plan.groups_per_block = static_cast<int>(groups);
  plan.block = config.block;
  plan.cluster = cluster;
  plan.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, cluster));
  plan.held = static_cast<int>(std::min(ceil_div(plan.pixels_per_chunk, rows), capacity));
  return plan;
}

GroupNormPlan plan_channels_first(const GroupNormParams& p) {
  GroupNormPlan plan;
  const int64_t wide = 16 / static_cast<int64_t>(size_of(p.dtype));
  if (p.channels_last) return plan;
  const bool vectors = p.spatial % wide == 0 && are_aligned<16>(p.x, p.skip_broadcast ? nullptr : p.skip, p.y, p.sum);
  plan.vector_bytes = vectors ? 16 : static_cast<int>(size_of(p.dtype));
  return plan;
}

// Of no access (vector_bytes = 0) where the configuration does not suit the call.
GroupNormPlan make_plan(const GroupNormParams& p, const GroupNormConfig& config) {
  switch (config.kernel) {
    case GroupNormConfig::kTwoReads:
      return p.channels_last ? plan_two_reads(p) : GroupNormPlan{};
    case GroupNormConfig::kChannelsFirst:
      return plan_channels_first(p);
    case GroupNormConfig::kOneRead:
      return plan_one_read(p, config);
    default:
      return plan_cluster(p, config);
  }
}

bool is_empty(const GroupNormParams& p) { return p.batch == 0 || p.spatial == 0; }

// Whether a cluster is the default: all its pixels fit, and there is little enough that the second read of the other
// way costs more than what clusters spend on meeting. With a skip both ways read and write twice as much.
bool takes_clusters(const GroupNormParams& p) {
  constexpr int64_t kFewElements = 8 << 20;
  const GroupNormConfig& config = kClusterConfigs[0];
  const GroupNormPlan plan = plan_cluster(p, config);
  if (plan.vector_bytes < 8) return false;
  const int64_t slices = plan.groups_per_block * (p.channels / p.groups) * size_of(p.dtype) / plan.vector_bytes;
  const bool fits = plan.held * (config.block / slices) >= plan.pixels_per_chunk;
  return fits && (p.skip == nullptr || p.batch * p.spatial * p.channels <= kFewElements);
}

}  // namespace

// The default, as measured on an H200 (results/ops_sm_90.md): one read by a block where a pixel's part of the group is
// whole 8-byte accesses and the group fits the smallest block, or the next one when two neighboring groups make
// accesses wider and leave enough blocks; a cluster where that fits; one read by a larger block; two reads.
GroupNormConfig group_norm_default(const GroupNormParams& p) {
  constexpr int64_t kEnoughBlocks = 96;
  if (is_empty(p)) return {GroupNormConfig::kPlain};
  if (!p.channels_last) return {GroupNormConfig::kChannelsFirst};
  for (GroupNormConfig config : kOneReadConfigs) {
    const bool smallest = config.block == kOneReadConfigs[0].block;
    const GroupNormPlan single = plan_one_read(p, config);
    config.groups_per_block = 2;
    const GroupNormPlan pair = plan_one_read(p, config);
    if (pair.vector_bytes > single.vector_bytes && pair.vector_bytes == 16 && p.batch * p.groups / 2 >= kEnoughBlocks) {
      return config;
    }
    config.groups_per_block = 1;
    if (single.vector_bytes >= 8 && (smallest || !takes_clusters(p))) return config;
  }
  if (takes_clusters(p)) return kClusterConfigs[0];
  return {plan_two_reads(p).vector_bytes > 0 ? GroupNormConfig::kTwoReads : GroupNormConfig::kPlain};
}

std::vector<GroupNormConfig> group_norm_configs() {
  std::vector<GroupNormConfig> configs = {
      {GroupNormConfig::kPlain}, {GroupNormConfig::kTwoReads}, {GroupNormConfig::kChannelsFirst}};
  for (GroupNormConfig config : kOneReadConfigs) {
    for (int groups : {1, 2, 4}) {
      config.groups_per_block = groups;
      configs.push_back(config);
    }
  }
  if (group_norm_has_clusters()) {
    configs.insert(configs.end(), std::begin(kClusterConfigs), std::end(kClusterConfigs));
  }
  return configs;
}

bool group_norm_supports(const GroupNormParams& p, const GroupNormConfig& config) {
  if (config.kernel == GroupNormConfig::kPlain) return true;
  return !is_empty(p) && make_plan(p, config).vector_bytes > 0;
}

size_t group_norm_workspace(const GroupNormParams& p, const GroupNormConfig& config) {
  if (config.kernel != GroupNormConfig::kTwoReads) return 0;
  return p.batch * plan_two_reads(p).chunks * p.groups * 3 * sizeof(float);
}

const char* group_norm_launch(const GroupNormParams& p, const GroupNormConfig& config, void* workspace, void* stream) {
  if (is_empty(p)) return nullptr;
  if (p.spatial > INT32_MAX || p.channels > INT32_MAX || p.batch > 65535) return "the tensor is too large";
  const GroupNormPlan plan = config.kernel == GroupNormConfig::kPlain ? GroupNormPlan{} : make_plan(p, config);
  switch (config.kernel) {
    case GroupNormConfig::kPlain:
      return group_norm_plain(p, stream);
    case GroupNormConfig::kTwoReads:
      return group_norm_two_reads(p, plan, workspace, stream);
    case GroupNormConfig::kChannelsFirst:
      return group_norm_channels_first(p, plan, stream);
    case GroupNormConfig::kOneRead:
      return group_norm_one_read(p, plan, stream);
    default:
      return group_norm_cluster(p, plan, stream);
  }
}

}  // namespace sd_ort
