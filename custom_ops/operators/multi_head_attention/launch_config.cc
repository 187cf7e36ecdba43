// Supported shapes and default kernel of MultiHeadAttention.
#include "operators/multi_head_attention/op.h"

namespace sd_ort {
namespace {

using Kernel = MultiHeadAttentionKernel;
using Limits = MultiHeadAttentionLimits;

// Whether rows support 16-byte reads and 32-bit offsets.
bool supports_vectors(const HeadsView& view, int64_t rows) {
  return view.row_stride % 8 == 0 && view.head_stride % 8 == 0 && view.batch_stride % 8 == 0 &&
         are_aligned<16>(view.data) && rows * view.row_stride < int64_t{1} << 31;
}

}  // namespace

bool multi_head_attention_supports(const MultiHeadAttentionParams& p, Kernel kernel) {
  if (kernel == Kernel::kGeneric) return true;
  if (kernel == Kernel::kSmall && p.head_size > attention_max_flash_head()) return false;
  const bool is_short = kernel == Kernel::kShort || kernel == Kernel::kShortWarpgroup;
  const bool is_unmasked =
      kernel == Kernel::kShortWarpgroup || kernel == Kernel::kFullTiles || kernel == Kernel::kPingpong;
  const bool warpgroups = kernel == Kernel::kWarpgroup || kernel == Kernel::kTwoWarpgroups || is_unmasked;
  if (warpgroups && (p.head_size > Limits::kWarpgroupHead || !attention_has_warpgroups())) return false;
  if (kernel == Kernel::kPingpong && p.head_size > Limits::kPingpongHead) return false;
  if (is_short && (p.head_size > Limits::kShortHead || p.kv_sequence > Limits::kShortKeys)) return false;
  if (is_unmasked && (p.attention_bias != nullptr || p.causal || !(p.scale > 0.f))) return false;
  if (kernel == Kernel::kFullTiles &&
      (p.head_size != Limits::kFullTilesHead || p.kv_sequence % Limits::kFullTilesKeys != 0)) {
    return false;
  }
  return p.dtype != DType::kFloat32 && p.kv_sequence > 0 && p.head_size % 8 == 0 && p.head_size <= Limits::kMaxHead &&
         are_aligned<16>(p.output, p.quantized.data) && supports_vectors(p.query, p.sequence) &&
         supports_vectors(p.key, p.kv_sequence) && supports_vectors(p.value, p.kv_sequence);
}

bool multi_head_attention_prefers_pingpong(const MultiHeadAttentionParams& p) {
  constexpr int64_t kManyKeys = 2048;
  return p.kv_sequence >= kManyKeys && ceil_div(p.sequence, 64) * p.heads * p.batch >= attention_target_blocks() &&
         multi_head_attention_supports(p, Kernel::kPingpong);
}

Kernel multi_head_attention_default(const MultiHeadAttentionParams& p) {
  if (multi_head_attention_prefers_pingpong(p)) return Kernel::kPingpong;
  const bool many = ceil_div(p.sequence, 128) * p.heads * p.batch >= attention_target_blocks();
  const Kernel warpgroups = many ? Kernel::kTwoWarpgroups : Kernel::kWarpgroup;
  const Kernel waves = many ? Kernel::kLarge : Kernel::kSmall;
  for (Kernel kernel : {Kernel::kShortWarpgroup, Kernel::kShort, warpgroups, waves, Kernel::kLarge}) {
    if (multi_head_attention_supports(p, kernel)) return kernel;
  }
  return Kernel::kGeneric;
}

const char* multi_head_attention_launch(const MultiHeadAttentionParams& p, Kernel kernel, void* stream) {
  if (p.batch == 0 || p.heads == 0 || p.sequence == 0 || p.head_size == 0) return nullptr;
  switch (kernel) {
    case Kernel::kGeneric:
      return attention_generic(p, stream);
    case Kernel::kWarpgroup:
      return attention_warpgroups(p, 1, stream);
    case Kernel::kTwoWarpgroups:
      return attention_warpgroups(p, 2, stream);
    case Kernel::kShortWarpgroup:
      return attention_short_warpgroup(p, stream);
    case Kernel::kFullTiles:
      return attention_full_tiles(p, stream);
    case Kernel::kPingpong:
      return attention_pingpong(p, stream);
    default:
      return p.head_size <= attention_max_flash_head() ? attention_flash(p, kernel, stream)
                                                       : attention_large_head(p, stream);
  }
}

}  // namespace sd_ort
