// MultiHeadAttention: softmax(scale * Q K^T + attention_bias) V for each head, as com.microsoft::MultiHeadAttention.
//
// Query (B, S, N * H), key and value (B, L, N * H); or one packed (B, S, N, 3, H); or query and packed (B, L, N, 2, H).
// All come to the kernels as three pointers with strides, so that packed tensors are read in place.
// A row whose scores are all -infinity (every key masked) gives zeros.
#pragma once

#include "common/op.h"

namespace sd_ort {

// One of query, key and value: element (b, row, head, i) lies at data[b * batch + row * row + head * head + i].
struct HeadsView {
  const void* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

struct MultiHeadAttentionParams {
  DType dtype;
  HeadsView query;             // (batch, sequence, heads, head_size)
  HeadsView key;               // (batch, kv_sequence, heads, head_size)
  HeadsView value;             // as key
  const void* attention_bias;  // added to the scores: rows of kv_sequence, one for each query; null for none
  void* output;                // (batch, sequence, heads * head_size), contiguous
  int64_t batch;
  int64_t heads;
  int64_t sequence;
  int64_t kv_sequence;
  int64_t head_size;
  int64_t bias_batch_stride;  // 0 where attention_bias is broadcast
  int64_t bias_head_stride;
  float scale;
  int32_t causal;  // a query sees keys at its own position and before

  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, heads, sequence, kv_sequence, head_size}) text += "_" + std::to_string(size);
    if (query.row_stride != heads * head_size) text += "_qkv";
    if (attention_bias != nullptr) text += "_bias";
    if (causal) text += "_causal";
    return text;
  }
  std::vector<Output> outputs() const {
    return {{output, static_cast<size_t>(batch * sequence * heads * head_size), dtype}};
  }
};

// The kernels to choose from; kernels/ say which tiles each has by head size.
enum class MultiHeadAttentionKernel {
  kLarge,           // matrix instructions, 128 queries per block (64 for heads that several waves share)
  kSmall,           // matrix instructions, 64 queries per block: more blocks for short sequences
  kShort,           // matrix instructions, all of up to 80 keys in one tile: cross-attention to a prompt of 77 tokens
  kPlain,           // no matrix instructions: any type and alignment
  kWarpgroup,       // NVIDIA's warpgroup instructions, 64 queries per block
  kTwoWarpgroups,   // the same, 128 queries per block
  kShortWarpgroup,  // the same, 64 queries per block and up to 80 keys at once, no mask
  kWholeTiles,      // the same, 64 queries per block, whole tiles of keys and no mask: many blocks at once
};

// ---- launch_config.cc

// What the kernels for some keys or heads alone take at most.
struct MultiHeadAttentionLimits {
  static constexpr int64_t kShortHead = 80, kShortKeys = 80, kWarpgroupHead = 128, kWideHead = 512,
                           kWholeTilesHead = 64, kWholeTilesKeys = 64;
};
bool multi_head_attention_supports(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel);
// Which of our kernels runs a call that was never measured.
MultiHeadAttentionKernel multi_head_attention_default(const MultiHeadAttentionParams& params);
const char* multi_head_attention_launch(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel,
                                        void* stream);

// ---- kernels/, a launcher each

const char* attention_plain(const MultiHeadAttentionParams& params, void* stream);
// kLarge, kSmall and kShort, of heads up to the number below.
const char* attention_flash(const MultiHeadAttentionParams& params, MultiHeadAttentionKernel kernel, void* stream);
int64_t attention_largest_flash_head();
const char* attention_wide(const MultiHeadAttentionParams& params, void* stream);
// `groups` warpgroups a block, 1 or 2; whether there are such for the current device.
const char* attention_warpgroups(const MultiHeadAttentionParams& params, int groups, void* stream);
const char* attention_short_warpgroup(const MultiHeadAttentionParams& params, void* stream);
const char* attention_whole_tiles(const MultiHeadAttentionParams& params, void* stream);
bool attention_has_warpgroups();

}  // namespace sd_ort
