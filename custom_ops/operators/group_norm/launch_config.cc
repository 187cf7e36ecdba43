// Launch parameters of GroupNorm, computed on the host from the shape and a configuration.
#include <algorithm>
#include <climits>
#include <iterator>

#include "operators/group_norm/op.h"

namespace sd_ort {
namespace {

// Compiled sizes of the single-pass kernel. They hold 24, 88, 168 and 96 KB.
constexpr GroupNormConfig kSinglePassConfigs[] = {{GroupNormConfig::kSinglePass, 256, 24, 1},
                                                  {GroupNormConfig::kSinglePass, 512, 44, 1},
                                                  {GroupNormConfig::kSinglePass, 512, 84, 1},
                                                  {GroupNormConfig::kSinglePass, 1024, 24, 1}};

// Two blocks per multiprocessor; one with all LDS; the same for complete pixels; four with less LDS each. Spans of
// Stable Diffusion are 5 or 10 times 32 bytes, which divide 320 and 640 threads.
constexpr GroupNormConfig kClusterConfigs[] = {{GroupNormConfig::kCluster, 320, 0, 0, 128, 96 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 128, 200 * 1024},
                                               {GroupNormConfig::kCluster, 640, 0, 0, 512, 200 * 1024},
                                               {GroupNormConfig::kCluster, 320, 0, 0, 64, 48 * 1024}};

bool supports_bytes(const GroupNormParams& p, int bytes) {
  return bytes == static_cast<int>(size_of(p.dtype)) ||
         (p.channels * size_of(p.dtype) % bytes == 0 && are_aligned<16>(p.x, p.skip, p.y, p.sum, p.quantized.data));
}

// Widest access of at most `limit` bytes for a span of groups: no slice crosses the end of the span or touches three
// groups.
int widest_access(const GroupNormParams& p, int64_t span, int limit) {
  const int size = static_cast<int>(size_of(p.dtype));
  for (int bytes = limit; bytes > size; bytes /= 2) {
    if (span * size % bytes == 0 && bytes / size <= p.channels / p.groups && supports_bytes(p, bytes)) return bytes;
  }
  return size;
}

int64_t items_needed(const GroupNormParams& p, const GroupNormConfig& config, int vector_bytes) {
  const int64_t span = config.groups_per_block * (p.channels / p.groups);
  const int64_t slices = span * size_of(p.dtype) / vector_bytes;
  return slices > config.block ? INT64_MAX : ceil_div(p.spatial, config.block / slices);
}

GroupNormLaunch single_pass_launch(const GroupNormParams& p, const GroupNormConfig& config) {
  GroupNormLaunch launch;
  if (!p.channels_last || p.groups % config.groups_per_block != 0) return launch;
  if (p.spatial * p.channels > INT32_MAX) return launch;  // offsets within a sample are 32-bit
  const int bytes = widest_access(p, config.groups_per_block * (p.channels / p.groups), 16);
  // narrow accesses have no instances with many items
  if ((bytes == 2 && config.block == 512) || (bytes < 16 && config.registers == 84)) return launch;
  if (items_needed(p, config, bytes) > group_norm_items(config.registers, bytes)) return launch;
  launch.vector_bytes = bytes;
  launch.groups_per_block = config.groups_per_block;
  launch.block = config.block;
  launch.registers = config.registers;
  return launch;
}

// Spans of at most one block; enough chunks to fill a large GPU, few enough that merging their moments is cheap.
GroupNormLaunch two_pass_launch(const GroupNormParams& p) {
  constexpr int64_t kBlocks = 384, kMaxChunks = 256, kPixelsPerThread = 8;
  GroupNormLaunch launch;
  const int64_t channels_per_group = p.channels / p.groups;
  const int size = static_cast<int>(size_of(p.dtype));
  for (int64_t groups = std::min<int64_t>(p.groups, GroupNormLaunch::kMaxGroupsPerBlock); groups > 0; --groups) {
    if (p.groups % groups != 0) continue;
    const int bytes = widest_access(p, groups * channels_per_group, 16);
    const int64_t slices = groups * channels_per_group * size / bytes;
    if (slices > GroupNormLaunch::kTwoPassBlock) continue;
    const int64_t rows = GroupNormLaunch::kTwoPassBlock / slices;
    const int64_t filling = ceil_div(kBlocks, p.batch * (p.groups / groups));
    const int64_t chunks = std::min({filling, kMaxChunks, ceil_div(p.spatial, rows * kPixelsPerThread)});
    launch.vector_bytes = bytes;
    launch.groups_per_block = static_cast<int>(groups);
    launch.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, chunks));
    launch.chunks = static_cast<int>(ceil_div(p.spatial, launch.pixels_per_chunk));
    break;
  }
  return launch;
}

// The narrowest span of groups with at least span_bytes per pixel, a multiple of 32-byte sectors if possible; the
// smallest cluster whose LDS holds all its pixels and that fills a large GPU.
GroupNormLaunch cluster_launch(const GroupNormParams& p, const GroupNormConfig& config) {
  constexpr int64_t kFilling = 100, kFewItems = 2;
  GroupNormLaunch launch;
  if (!p.channels_last || p.spatial * p.channels > INT32_MAX || group_norm_largest_cluster() == 0) return launch;
  const int64_t channels_per_group = p.channels / p.groups, size = static_cast<int64_t>(size_of(p.dtype));
  int64_t groups = 0;
  for (bool full_sectors : {true, false}) {
    for (int64_t g = 1; g <= std::min<int64_t>(p.groups, GroupNormLaunch::kMaxClusterGroups) && groups == 0; ++g) {
      const int64_t bytes = g * channels_per_group * size;
      if (p.groups % g == 0 && bytes >= config.span_bytes && (!full_sectors || bytes % 32 == 0)) groups = g;
    }
  }
  if (groups == 0) groups = p.groups <= GroupNormLaunch::kMaxClusterGroups ? p.groups : 1;
  const int bytes = widest_access(p, groups * channels_per_group, 16);
  const int64_t slices = groups * channels_per_group * size / bytes;
  if (bytes < 4 || slices > config.block) return launch;
  const int64_t rows = config.block / slices, capacity = config.lds_bytes / (config.block * bytes);
  int cluster = 1;
  for (; cluster < group_norm_largest_cluster(); cluster *= 2) {
    const int64_t items = ceil_div(ceil_div(p.spatial, cluster), rows);
    const bool fills = p.batch * (p.groups / groups) * cluster >= kFilling || items <= kFewItems;
    if (items <= capacity && fills) break;
  }
  launch.vector_bytes = bytes;
  launch.groups_per_block = static_cast<int>(groups);
  launch.block = config.block;
  launch.cluster = cluster;
  launch.pixels_per_chunk = static_cast<int>(ceil_div(p.spatial, cluster));
  launch.lds_items = static_cast<int>(std::min(ceil_div(launch.pixels_per_chunk, rows), capacity));
  return launch;
}

GroupNormLaunch channels_first_launch(const GroupNormParams& p) {
  GroupNormLaunch launch;
  const int64_t wide = 16 / static_cast<int64_t>(size_of(p.dtype));
  if (p.channels_last) return launch;
  const bool vectors =
      p.spatial % wide == 0 && are_aligned<16>(p.x, p.skip_broadcast ? nullptr : p.skip, p.y, p.sum, p.quantized.data);
  launch.vector_bytes = vectors ? 16 : static_cast<int>(size_of(p.dtype));
  return launch;
}

// Returns vector_bytes = 0 if the configuration does not support the call.
GroupNormLaunch launch_parameters(const GroupNormParams& p, const GroupNormConfig& config) {
  switch (config.kernel) {
    case GroupNormConfig::kTwoPass:
      return p.channels_last ? two_pass_launch(p) : GroupNormLaunch{};
    case GroupNormConfig::kChannelsFirst:
      return channels_first_launch(p);
    case GroupNormConfig::kSinglePass:
      return single_pass_launch(p, config);
    default:
      return cluster_launch(p, config);
  }
}

bool is_empty(const GroupNormParams& p) { return p.batch == 0 || p.spatial == 0; }

// Whether a cluster is the default: all its pixels fit in LDS, and the tensor is small enough that a second read costs
// more than the cluster barriers. With a skip, both alternatives read and write twice as much.
bool prefers_clusters(const GroupNormParams& p) {
  constexpr int64_t kFewElements = 8 << 20;
  const GroupNormConfig& config = kClusterConfigs[0];
  const GroupNormLaunch launch = cluster_launch(p, config);
  if (launch.vector_bytes < 8) return false;
  const int64_t slices = launch.groups_per_block * (p.channels / p.groups) * size_of(p.dtype) / launch.vector_bytes;
  const bool fits = launch.lds_items * (config.block / slices) >= launch.pixels_per_chunk;
  return fits && (p.skip == nullptr || p.batch * p.spatial * p.channels <= kFewElements);
}

}  // namespace

// The default, measured on an H200 (results/ops_sm_90.md): single pass by one block if a pixel's part of the group has
// 8-byte accesses and the group fits the smallest block, or the next one if two adjacent groups widen the accesses and
// leave enough blocks; a cluster if it fits; single pass by a larger block; else two passes.
GroupNormConfig group_norm_default(const GroupNormParams& p) {
  constexpr int64_t kEnoughBlocks = 96;
  if (is_empty(p)) return {GroupNormConfig::kGeneric};
  if (!p.channels_last) return {GroupNormConfig::kChannelsFirst};
  for (GroupNormConfig config : kSinglePassConfigs) {
    const bool smallest = config.block == kSinglePassConfigs[0].block;
    const GroupNormLaunch single = single_pass_launch(p, config);
    config.groups_per_block = 2;
    const GroupNormLaunch pair = single_pass_launch(p, config);
    if (pair.vector_bytes > single.vector_bytes && pair.vector_bytes == 16 && p.batch * p.groups / 2 >= kEnoughBlocks) {
      return config;
    }
    config.groups_per_block = 1;
    if (single.vector_bytes >= 8 && (smallest || !prefers_clusters(p))) return config;
  }
  if (prefers_clusters(p)) return kClusterConfigs[0];
  return {two_pass_launch(p).vector_bytes > 0 ? GroupNormConfig::kTwoPass : GroupNormConfig::kGeneric};
}

std::vector<GroupNormConfig> group_norm_configs() {
  std::vector<GroupNormConfig> configs = {
      {GroupNormConfig::kGeneric}, {GroupNormConfig::kTwoPass}, {GroupNormConfig::kChannelsFirst}};
  for (GroupNormConfig config : kSinglePassConfigs) {
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
  if (config.kernel == GroupNormConfig::kGeneric) return true;
  return !is_empty(p) && launch_parameters(p, config).vector_bytes > 0;
}

size_t group_norm_workspace(const GroupNormParams& p, const GroupNormConfig& config) {
  if (config.kernel != GroupNormConfig::kTwoPass) return 0;
  return p.batch * two_pass_launch(p).chunks * p.groups * 3 * sizeof(float);
}

const char* group_norm_launch(const GroupNormParams& p, const GroupNormConfig& config, void* workspace, void* stream) {
  if (is_empty(p)) return nullptr;
  if (p.spatial > INT32_MAX || p.channels > INT32_MAX || p.batch > 65535) return "the tensor is too large";
  const GroupNormLaunch launch =
      config.kernel == GroupNormConfig::kGeneric ? GroupNormLaunch{} : launch_parameters(p, config);
  switch (config.kernel) {
    case GroupNormConfig::kGeneric:
      return group_norm_generic(p, stream);
    case GroupNormConfig::kTwoPass:
      return group_norm_two_pass(p, launch, workspace, stream);
    case GroupNormConfig::kChannelsFirst:
      return group_norm_channels_first(p, launch, stream);
    case GroupNormConfig::kSinglePass:
      return group_norm_single_pass(p, launch, stream);
    default:
      return group_norm_cluster(p, launch, stream);
  }
}

}  // namespace sd_ort
