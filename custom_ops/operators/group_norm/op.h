// GroupNorm(X, gamma, beta; quantized_scale) -> Y?, quantized? and SkipGroupNorm(X, gamma, beta, skip, bias?;
// quantized_scale) -> Y?, S?, quantized?, as in com.microsoft; quantized is Y / quantized_scale in float8.
//
// V = X + skip + bias; Y = activation((V - mean) / sqrt(variance + epsilon) * gamma + beta), mean and variance over the
// spatial positions and channels of a group, variance over n. S = V.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct GroupNormParams {
  DType dtype;         // of x, skip, bias, y and sum
  DType affine_dtype;  // of gamma and beta: float32 or dtype
  const void* x;       // (batch, spatial, channels) or, channels_last = 0, (batch, channels, spatial)
  const void* skip;    // as x; (batch, channels) when skip_broadcast; null for GroupNorm
  const void* bias;    // (channels) or null
  const void* gamma;   // (channels)
  const void* beta;    // (channels)
  void* y;             // as x, or null
  void* sum;           // as x, or null if S is not requested
  int64_t batch;
  int64_t spatial;  // H * W
  int64_t channels;
  int64_t groups;
  int32_t activation;  // 0 none, 1 SiLU
  int32_t channels_last;
  int32_t skip_broadcast;
  float epsilon;
  Float8Output quantized;  // as x

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(batch) + "x" + std::to_string(spatial) + "x" +
           std::to_string(channels) + (channels_last ? "" : "_nchw") + "_g" + std::to_string(groups) +
           (skip == nullptr  ? ""
            : skip_broadcast ? "_broadcast"
                             : "_skip") +
           (sum == nullptr ? "" : "_sum") + quantized.suffix(y);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(batch * spatial * channels);
    return {{y, count, dtype}, {sum, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

// A kernel and its compile-time and launch options.
struct GroupNormConfig {
  enum Kernel { kGeneric, kTwoPass, kChannelsFirst, kSinglePass, kCluster } kernel;
  int block = 0;             // single pass, cluster: threads
  int registers = 0;         // single pass: registers per thread that hold the group
  int groups_per_block = 0;  // single pass
  int span_bytes = 0;        // cluster: minimum bytes per pixel
  int lds_bytes = 0;         // cluster: maximum LDS of a block for its pixels

  std::string name() const {
    switch (kernel) {
      case kGeneric:
        return "generic";
      case kTwoPass:
        return "two_pass";
      case kChannelsFirst:
        return "channels_first";
      case kSinglePass:
        return "single_pass_" + std::to_string(block) + "x" + std::to_string(registers) + "_g" +
               std::to_string(groups_per_block);
      default:
        return "cluster_" + std::to_string(block) + "_" + std::to_string(span_bytes) + "b_" +
               std::to_string(lds_bytes / 1024) + "k";
    }
  }
};

// Launch parameters of a call, from its shape and a configuration (launch_config.cc).
struct GroupNormLaunch {
  static constexpr int kTwoPassBlock = 256, kMaxGroupsPerBlock = 64, kMaxClusterGroups = 32;

  int vector_bytes = 0;  // access size; 0 if the configuration does not support the call
  int groups_per_block = 0;
  int block = 0;             // single pass, cluster: threads
  int registers = 0;         // single pass
  int chunks = 0;            // two pass
  int pixels_per_chunk = 0;  // two pass: of a chunk; cluster: of a block
  int cluster = 0;           // cluster: blocks
  int lds_items = 0;         // cluster: items per thread in LDS
};

// Number of accesses of `vector_bytes` that fill `registers`.
constexpr int group_norm_items(int registers, int vector_bytes) {
  return vector_bytes >= 4 ? registers * 4 / vector_bytes : registers;
}

// ---- launch_config.cc

// All configurations of this build, the generic one first, and the default configuration of a call.
std::vector<GroupNormConfig> group_norm_configs();
GroupNormConfig group_norm_default(const GroupNormParams& params);
bool group_norm_supports(const GroupNormParams& params, const GroupNormConfig& config);
size_t group_norm_workspace(const GroupNormParams& params, const GroupNormConfig& config);
const char* group_norm_launch(const GroupNormParams& params, const GroupNormConfig& config, void* workspace,
                              void* stream);

// ---- kernels/: launchers

const char* group_norm_generic(const GroupNormParams& params, void* stream);
const char* group_norm_two_pass(const GroupNormParams& params, const GroupNormLaunch& launch, void* workspace,
                                void* stream);
const char* group_norm_channels_first(const GroupNormParams& params, const GroupNormLaunch& launch, void* stream);
const char* group_norm_single_pass(const GroupNormParams& params, const GroupNormLaunch& launch, void* stream);
const char* group_norm_cluster(const GroupNormParams& params, const GroupNormLaunch& launch, void* stream);
bool group_norm_has_clusters();    // whether this library has cluster kernels
int group_norm_largest_cluster();  // of the current device, in blocks; 0 if it has no clusters

}  // namespace sd_ort
