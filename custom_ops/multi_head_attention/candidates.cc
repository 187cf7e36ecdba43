// The ways to run MultiHeadAttention on a GPU, and the default by the number of blocks.
#include "common/tunable.h"
#include "multi_head_attention/op.h"

namespace sd_ort {
namespace {

using Kernel = MultiHeadAttentionKernel;

// Blocks under which large tiles leave much of a large GPU idle.
constexpr int64_t kManyBlocks = 400;

Kernel default_kernel(const MultiHeadAttentionParams& p) {
  const bool many = (p.sequence + 127) / 128 * p.heads * p.batch >= kManyBlocks;
  const Kernel warpgroups = many ? Kernel::kTwoWarpgroups : Kernel::kWarpgroup;
  const Kernel waves = many ? Kernel::kLarge : Kernel::kSmall;
  for (Kernel kernel : {Kernel::kShort, warpgroups, waves, Kernel::kLarge}) {
    if (multi_head_attention_supports(p, kernel)) return kernel;
  }
  return Kernel::kPlain;
}

Candidate<MultiHeadAttentionParams> candidate(const char* name, Kernel kernel) {
  return {name, [kernel](const MultiHeadAttentionParams& p) { return multi_head_attention_supports(p, kernel); },
          [kernel](const MultiHeadAttentionParams& p, void*, void* stream) {
            return multi_head_attention_launch(p, kernel, stream);
          }};
}

}  // namespace

const GpuOp& multi_head_attention_gpu() {
  static const TunableOp<MultiHeadAttentionParams> op(
      "MultiHeadAttention", {{"default", [](const MultiHeadAttentionParams&) { return true; },
                              [](const MultiHeadAttentionParams& p, void*, void* stream) {
                                return multi_head_attention_launch(p, default_kernel(p), stream);
                              }},
                             candidate("large_tiles", Kernel::kLarge),
                             candidate("small_tiles", Kernel::kSmall),
                             candidate("short_keys", Kernel::kShort),
                             candidate("warpgroup", Kernel::kWarpgroup),
                             candidate("two_warpgroups", Kernel::kTwoWarpgroups),
                             candidate("plain", Kernel::kPlain)});
  return op;
}

}  // namespace sd_ort
