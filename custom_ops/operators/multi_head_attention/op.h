// MultiHeadAttention: softmax(scale * Q K^T + attention_bias) V per head, as com.microsoft::MultiHeadAttention.
//
// Query (B, S, N * H), key and value (B, L, M * H); or one packed (B, S, N, 3, H); or query and packed (B, L, M, 2, H).
// With fewer heads of keys than of queries, M < N, adjacent N / M query heads share one (grouped-query attention).
// Kernels get three pointers with strides, which read packed tensors in place. The second output is the first one
// / quantized_scale in float8.
// A row whose scores are all -infinity (every key masked) gives zeros.
#pragma once

#include "common/op.h"

namespace sd_ort {

// Query, key or value: element (b, row, head, i) is data[b * batch_stride + row * row_stride + head * head_stride + i].
struct HeadsView {
  const void* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

struct MultiHeadAttentionParams {
  DType dtype;
  HeadsView query;             // (batch, sequence, heads, head_size)
  HeadsView key;               // (batch, kv_sequence, kv_heads, head_size)
  HeadsView value;             // as key
  const void* attention_bias;  // added to the scores: a row of kv_sequence per query; or null
  void* output;                // (batch, sequence, heads * head_size), contiguous; or null
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;  // divides heads
  int64_t sequence;
  int64_t kv_sequence;
  int64_t head_size;
  int64_t bias_batch_stride;  // 0 if attention_bias is broadcast
  int64_t bias_head_stride;
  float scale;
  int32_t causal;          // a query attends to keys up to its own position
  Float8Output quantized;  // as output

  // Head of key and value that a query head attends to.
  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }

  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, heads, sequence, kv_sequence, head_size}) text += "_" + std::to_string(size);
    if (kv_heads != heads) text += "_kv" + std::to_string(kv_heads);
    if (query.row_stride != heads * head_size) text += "_qkv";
    if (attention_bias != nullptr) text += "_bias";
    if (causal) text += "_causal";
    return text + quantized.suffix(output);
  }
  std::vector<Output> outputs() const {
    const size_t count = static_cast<size_t>(batch * sequence * heads * head_size);
    return {{output, count, dtype}, {quantized.data, count, DType::kFloat8}};
  }
};

// Kernels; kernels/ defines their tiles by head size.
enum class MultiHeadAttentionKernel {
  kLarge,           // matrix instructions, 128 queries per block (64 for heads that several waves share)
  kSmall,           // matrix instructions, 64 queries per block: more blocks for short sequences
  kShort,           // matrix instructions, up to 80 keys in one tile: cross-attention to a prompt of 77 tokens
  kGeneric,         // no matrix instructions: any type and alignment
  kWarpgroup,       // NVIDIA's warpgroup instructions, 64 queries per block
  kTwoWarpgroups,   // warpgroup instructions, 128 queries per block
  kShortWarpgroup,  // warpgroup instructions, 64 queries per block, up to 80 keys, no mask
  kFullTiles,       // warpgroup instructions, 64 queries per block, only full tiles of keys, no mask: many blocks per
                    // multiprocessor
  kPingpong,        // warpgroup instructions, 192 queries per block, warpgroups multiply in turn, heads up to 40, no
                    // mask
};

// ---- launch_config.cc

// Largest head sizes and key counts of the specialized kernels.
struct MultiHeadAttentionLimits {
  static constexpr int64_t kShortHead = 80, kShortKeys = 80, kWarpgroupHead = 128, kMaxHead = 512, kFullTilesHead = 64,
                           kFullTilesKeys = 64, kPingpongHead = 40;
};
bool multi_head_attention_supports(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel);
// Whether the default is kPingpong, also where cuDNN has a plan: many keys, and queries that fill the device.
bool multi_head_attention_prefers_pingpong(const MultiHeadAttentionParams& params);
// Default kernel of sd-ort for a call.
MultiHeadAttentionKernel multi_head_attention_default(const MultiHeadAttentionParams& params);
const char* multi_head_attention_launch(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel,
                                        void* stream);

// ---- kernels/: launchers

const char* attention_generic(const MultiHeadAttentionParams& params, void* stream);
// kLarge, kSmall and kShort, for heads up to attention_max_flash_head().
const char* attention_flash(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel, void* stream);
int64_t attention_max_flash_head();
// Blocks with fewer of which large tiles leave much of the current device idle: three per multiprocessor.
int64_t attention_target_blocks();
const char* attention_large_head(const MultiHeadAttentionParams& params, void* stream);
// `groups` is the number of warpgroups per block, 1 or 2. attention_has_warpgroups(): whether the device supports them.
const char* attention_warpgroups(const MultiHeadAttentionParams& params, int groups, void* stream);
const char* attention_short_warpgroup(const MultiHeadAttentionParams& params, void* stream);
const char* attention_full_tiles(const MultiHeadAttentionParams& params, void* stream);
const char* attention_pingpong(const MultiHeadAttentionParams& params, void* stream);
bool attention_has_warpgroups();

}  // namespace sd_ort
