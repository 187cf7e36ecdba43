// Launch parameters of SkipLayerNormalization: threads per row and vectors per thread.
#include "operators/skip_layer_norm/op.h"

namespace sd_ort {
namespace {

bool supports_vectors(const SkipLayerNormParams& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 &&
         are_aligned<16>(p.x, p.skip, p.gamma, p.beta, p.bias, p.y, p.sum, p.quantized.data);
}

int64_t vectors_per_row(const SkipLayerNormParams& p) { return p.channels * size_of(p.dtype) / 16; }

}  // namespace

// Returns the smallest item count with which `lanes` threads hold a row, or 0. Rows of Stable Diffusion have 40, 80 and
// 160 float16 vectors: 5 items of 8, 16 and 32 lanes.
int skip_layer_norm_items(const SkipLayerNormParams& p, int lanes) {
  if (!supports_vectors(p)) return 0;
  for (int items : {2, 5, 8}) {
    if (lanes < 32 && items != 5) continue;
    if (vectors_per_row(p) <= lanes * items) return items;
  }
  return 0;
}

// Few lanes per row use all threads; few rows need many lanes. Returns 0 if no lane count holds a row.
int skip_layer_norm_lanes(const SkipLayerNormParams& p) {
  constexpr int64_t kThreadsToFill = 1 << 15;
  for (int lanes : {8, 16, 32}) {
    if (skip_layer_norm_items(p, lanes) > 0 && p.rows * lanes >= kThreadsToFill) return lanes;
  }
  return skip_layer_norm_items(p, SkipLayerNormConfig::kBlock) > 0 ? SkipLayerNormConfig::kBlock : 0;
}

}  // namespace sd_ort
