// Weights of a product in bfloat16, in the order that the matrix units of CPUs read them: panels of 16 columns, each
// cut into blocks of 32 depths of one tap (a filter's pixel; a matrix has one),
//   [panel][tap][block][16 pairs of depths][16 columns][2],
// zeros where there is no column or depth, an even number of panels.
#pragma once

#include <cstring>
#include <mutex>
#include <new>

#include "common/op.h"

namespace sd_ort {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kBlockDepth = 32;
constexpr int64_t kBlockNumbers = kPanelColumns * kBlockDepth;

// Where weight (depth, tap, column) lies: data[depth * depth_stride + tap + column * column_stride].
struct WeightLayout {
  const void* data;
  DType dtype;  // float32, which is rounded, or bfloat16
  int64_t depth, taps, columns;
  int64_t depth_stride, column_stride;
  // Even panels hold columns of the left half and odd ones those of the right half, so that a pair has both parts of
  // what a column of the right gates.
  bool halves = false;

  int64_t blocks() const { return ceil_div(depth, kBlockDepth); }
  int64_t panels() const {
    return halves ? 2 * ceil_div(columns / 2, kPanelColumns) : 2 * ceil_div(columns, 2 * kPanelColumns);
  }
};

// The bits of a float as a bfloat16, rounded to the nearest, to even between two; a NaN stays one.
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

// Packed by the first call that asks, kept for the others; calls may come from several threads.
class PackedWeights {
 public:
  PackedWeights() = default;
  ~PackedWeights() { ::operator delete(numbers_, kAlignment); }
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  const uint16_t* get(const WeightLayout& weights, const Parallel& parallel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (numbers_ == nullptr) {
      const int64_t each = weights.taps * weights.blocks() * kBlockNumbers, panels = weights.panels();
      const size_t bytes = static_cast<size_t>(panels * each) * 2;
      numbers_ = static_cast<uint16_t*>(::operator new(bytes, kAlignment));
      if (bytes > 0) {
        parallel(static_cast<size_t>(panels), [&](size_t panel) {
          pack_panel(weights, static_cast<int64_t>(panel), numbers_ + static_cast<int64_t>(panel) * each);
        });
      }
    }
    return numbers_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  std::mutex mutex_;
  uint16_t* numbers_ = nullptr;
};

}  // namespace sd_ort
