// GroupNorm(X, gamma, beta) -> Y and SkipGroupNorm(X, gamma, beta, skip, bias?) -> Y, S?, as in com.microsoft.
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
  void* y;             // as x
  void* sum;           // as x, or null: S is not asked for
  int64_t batch;
  int64_t spatial;  // H * W
  int64_t channels;
  int64_t groups;
  int32_t activation;  // 0 none, 1 SiLU
  int32_t channels_last;
  int32_t skip_broadcast;
  float epsilon;

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(batch) + "x" + std::to_string(spatial) + "x" +
           std::to_string(channels) + (channels_last ? "" : "_nchw") + "_g" + std::to_string(groups) +
           (skip == nullptr  ? ""
            : skip_broadcast ? "_broadcast"
                             : "_skip") +
           (sum == nullptr ? "" : "_sum");
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(batch * spatial * channels);
    return {{y, count, dtype}, {sum, count, dtype}};
  }
};

// Which kernel, and what it is compiled or told to use; see kernels/.
struct GroupNormConfig {
  enum Kernel { kPlain, kTwoReads, kChannelsFirst, kOneRead, kCluster } kernel;
  int block = 0;             // one read, cluster: threads
  int registers = 0;         // one read: registers per thread that hold the group
  int groups_per_block = 0;  // one read
  int span_bytes = 0;        // cluster: least bytes of a pixel that it takes
  int lds_bytes = 0;         // cluster: most LDS a block holds its pixels in

  std::string name() const {
    switch (kernel) {
      case kPlain:
        return "plain";
      case kTwoReads:
        return "two_reads";
      case kChannelsFirst:
        return "channels_first";
      case kOneRead:
        return "one_read_" + std::to_string(block) + "x" + std::to_string(registers) + "_g" +
               std::to_string(groups_per_block);
      default:
        return "cluster_" + std::to_string(block) + "_" + std::to_string(span_bytes) + "b_" +
               std::to_string(lds_bytes / 1024) + "k";
    }
  }
};

// How a call is cut up, from its shape and a configuration (launch_config.cc).
struct GroupNormPlan {
  static constexpr int kTwoReadBlock = 256, kMaxGroupsPerBlock = 64, kMaxClusterGroups = 32;  // what kernels hold

  int vector_bytes = 0;  // of an access; 0: impossible
  int groups_per_block = 0;
  int block = 0;             // one read, cluster: threads
  int registers = 0;         // one read
  int chunks = 0;            // two reads
  int pixels_per_chunk = 0;  // two reads; cluster: a block's
  int cluster = 0;           // cluster: blocks
  int held = 0;              // cluster: items a thread keeps in LDS
};

// Accesses of so many bytes that fill `registers`.
constexpr int group_norm_items(int registers, int vector_bytes) {
  return vector_bytes >= 4 ? registers * 4 / vector_bytes : registers;
}

// ---- launch_config.cc

// All that this build of the kernels takes, the plainest first, and which of them runs a call that was never measured.
std::vector<GroupNormConfig> group_norm_configs();
GroupNormConfig group_norm_default(const GroupNormParams& params);
bool group_norm_supports(const GroupNormParams& params, const GroupNormConfig& config);
size_t group_norm_workspace(const GroupNormParams& params, const GroupNormConfig& config);
const char* group_norm_launch(const GroupNormParams& params, const GroupNormConfig& config, void* workspace,
                              void* stream);

// ---- kernels/, a launcher each

const char* group_norm_plain(const GroupNormParams& params, void* stream);
const char* group_norm_two_reads(const GroupNormParams& params, const GroupNormPlan& plan, void* workspace,
                                 void* stream);
const char* group_norm_channels_first(const GroupNormParams& params, const GroupNormPlan& plan, void* stream);
const char* group_norm_one_read(const GroupNormParams& params, const GroupNormPlan& plan, void* stream);
const char* group_norm_cluster(const GroupNormParams& params, const GroupNormPlan& plan, void* stream);
bool group_norm_has_clusters();    // whether this library was built with them
int group_norm_largest_cluster();  // of the current device, in blocks; 0: none

}  // namespace sd_ort
