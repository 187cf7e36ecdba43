// bfloat16 GEMM weights in the order of CPU matrix units: panels of 16 columns, panel_size divided into blocks of 32
// depths of one tap (a position of a convolution filter; a matrix has one tap),
//   [panel][tap][block][16 pairs of depths][16 columns][2],
// padded with zeros to an even number of panels.
#pragma once

#include <cstring>
#include <mutex>
#include <new>

#include "common/op.h"

namespace sd_ort {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kBlockDepth = 32;
constexpr int64_t kBlockElements = kPanelColumns * kBlockDepth;

// Unpacked weights: weight (depth, tap, column) is data[depth * depth_stride + tap + column * column_stride].
struct WeightLayout {
  const void* data;
  DType dtype;  // float32 (rounded to bfloat16) or bfloat16
  int64_t depth, taps, columns;
  int64_t depth_stride, column_stride;
  // Even panels hold columns of the left half and odd panels those of the right half, so that a pair has both operands
  // of GEGLU.
  bool halves = false;

  int64_t blocks() const { return ceil_div(depth, kBlockDepth); }
  int64_t panels() const {
    return halves ? 2 * ceil_div(columns / 2, kPanelColumns) : 2 * ceil_div(columns, 2 * kPanelColumns);
  }
};

// Rounds to bfloat16 (nearest, ties to even); NaN stays NaN.
inline uint16_t bfloat16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void pack_panel(const WeightLayout& w, int64_t panel, uint16_t* to) {
  const int64_t half = w.columns / 2;
  const int64_t first = w.halves ? panel / 2 * kPanelColumns + panel % 2 * half : panel * kPanelColumns;
  const int64_t columns = (w.halves && panel % 2 == 0 ? half : w.columns) - first;
  for (int64_t tap = 0; tap < w.taps; ++tap) {
    for (int64_t depth = 0; depth < w.blocks() * kBlockDepth; depth += 2) {
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        for (int64_t d = depth; d < depth + 2; ++d, ++to) {
          const int64_t at = d * w.depth_stride + tap + (first + column) * w.column_stride;
          *to = d >= w.depth || column >= columns ? 0
                : w.dtype == DType::kBFloat16     ? static_cast<const uint16_t*>(w.data)[at]
                                                  : bfloat16_bits(static_cast<const float*>(w.data)[at]);
        }
      }
    }
  }
}

// Weights packed by the first get(), which may be called by several threads.
class PackedWeights {
 public:
  PackedWeights() = default;
  ~PackedWeights() { ::operator delete(data_, kAlignment); }
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  const uint16_t* get(const WeightLayout& weights, const Parallel& parallel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (data_ == nullptr) {
      const int64_t panel_size = weights.taps * weights.blocks() * kBlockElements, panels = weights.panels();
      const size_t bytes = static_cast<size_t>(panels * panel_size) * 2;
      data_ = static_cast<uint16_t*>(::operator new(bytes, kAlignment));
      if (bytes > 0) {
        parallel(static_cast<size_t>(panels), [&](size_t panel) {
          pack_panel(weights, static_cast<int64_t>(panel), data_ + static_cast<int64_t>(panel) * panel_size);
        });
      }
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  std::mutex mutex_;
  uint16_t* data_ = nullptr;
};

}  // namespace sd_ort
