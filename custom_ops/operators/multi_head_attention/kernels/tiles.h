// Tile sizes per vendor. AMD has fewer registers than NVIDIA, and its waves of 64 handle more queries.
#pragma once

#include "common/vendors/which.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

// Tile of a block: queries, keys per step, and threads.
struct AttentionTile {
  int queries;
  int keys;
  int threads;
};

constexpr int64_t kLargestFlashHead = kHip ? 128 : 160;

constexpr AttentionTile flash_tile(MultiHeadAttentionKernel kernel, int head) {
  const bool large = kernel == MultiHeadAttentionKernel::kLarge, is_short = kernel == MultiHeadAttentionKernel::kShort;
  if (kHip) {
    const int keys = head > 96 ? 32 : 64;
    return large      ? AttentionTile{128, keys, 256}
           : is_short ? AttentionTile{128, 80, 256}
                      : AttentionTile{64, keys / 2, 128};
  }
  return large      ? AttentionTile{128, 64, head <= 64 ? 128 : 256}
         : is_short ? AttentionTile{64, 80, 128}
                    : AttentionTile{64, 64, 128};
}

// Threads per block of 64 queries for large heads. NVIDIA has no instance for heads up to 160, which use flash
// attention.
constexpr int wide_threads(int head) { return kHip && head > 160 ? 512 : 256; }

// Blocks per multiprocessor, a limit that lets nvcc use more registers. On AMD the number means waves, and the compiler
// chooses well without it.
constexpr int min_blocks(int head, int queries, bool once) {
  return kHip || queries > 64 || head > 64 ? 1 : once ? 5 : 3;
}

}  // namespace sd_ort
