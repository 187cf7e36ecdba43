// Which of MultiHeadAttention's kernels take a call, and which of them runs it untuned.
#include "operators/multi_head_attention/op.h"

namespace sd_ort {
namespace {

using Kernel = MultiHeadAttentionKernel;
using Limits = MultiHeadAttentionLimits;

// Blocks under which large tiles leave much of a large GPU idle.
constexpr int64_t kManyBlocks = 400;

// Whether rows can be read 16 bytes at a time and addressed by 32-bit offsets.
bool reads_wide(const HeadsView& view, int64_t rows) {
  return view.row_stride % 8 == 0 && view.head_stride % 8 == 0 && view.batch_stride % 8 == 0 &&
         are_aligned<16>(view.data) && rows * view.row_stride < int64_t{1} << 31;
}

}  // namespace

bool multi_head_attention_supports(const MultiHeadAttentionParams& p, Kernel kernel) {
  if (kernel == Kernel::kPlain) return true;
  if (kernel == Kernel::kSmall && p.head_size > attention_largest_flash_head()) return false;
  const bool is_short = kernel == Kernel::kShort || kernel == Kernel::kShortWarpgroup;
  const bool is_unmasked = kernel == Kernel::kShortWarpgroup || kernel == Kernel::kWholeTiles;
  const bool warpgroups = kernel == Kernel::kWarpgroup || kernel == Kernel::kTwoWarpgroups || is_unmasked;
  if (warpgroups && (p.head_size > Limits::kWarpgroupHead || !attention_has_warpgroups())) return false;
  if (is_short && (p.head_size > Limits::kShortHead || p.kv_sequence > Limits::kShortKeys)) return false;
  if (is_unmasked && (p.attention_bias != nullptr || p.causal || !(p.scale > 0.f))) return false;
  if (kernel == Kernel::kWholeTiles &&
      (p.head_size != Limits::kWholeTilesHead || p.kv_sequence % Limits::kWholeTilesKeys != 0)) {
    return false;
  }
  return p.dtype != DType::kFloat32 && p.kv_sequence > 0 && p.head_size % 8 == 0 && p.head_size <= Limits::kWideHead &&
         are_aligned<16>(p.output) && reads_wide(p.query, p.sequence) && reads_wide(p.key, p.kv_sequence) &&
         reads_wide(p.value, p.kv_sequence);
}

Kernel multi_head_attention_default(const MultiHeadAttentionParams& p) {
  const bool many = ceil_div(p.sequence, 128) * p.heads * p.batch >= kManyBlocks;
  const Kernel warpgroups = many ? Kernel::kTwoWarpgroups : Kernel::kWarpgroup;
  const Kernel waves = many ? Kernel::kLarge : Kernel::kSmall;
  for (Kernel kernel : {Kernel::kShortWarpgroup, Kernel::kShort, warpgroups, waves, Kernel::kLarge}) {
    if (multi_head_attention_supports(p, kernel)) return kernel;
  }
  return Kernel::kPlain;
}

const char* multi_head_attention_launch(const MultiHeadAttentionParams& p, Kernel kernel, void* stream) {
  if (p.batch == 0 || p.heads == 0 || p.sequence == 0 || p.head_size == 0) return nullptr;
  switch (kernel) {
    case Kernel::kPlain:
      return attention_plain(p, stream);
    case Kernel::kWarpgroup:
      return attention_warpgroups(p, 1, stream);
    case Kernel::kTwoWarpgroups:
      return attention_warpgroups(p, 2, stream);
    case Kernel::kShortWarpgroup:
      return attention_short_warpgroup(p, stream);
    case Kernel::kWholeTiles:
      return attention_whole_tiles(p, stream);
    default:
      return p.head_size <= attention_largest_flash_head() ? attention_flash(p, kernel, stream)
                                                           : attention_wide(p, stream);
  }
}

}  // namespace sd_ort
