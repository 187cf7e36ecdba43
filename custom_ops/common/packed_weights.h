// GEMM weights in bfloat16 or int8 in the order of CPU matrix units: panels of 16 columns, divided into blocks of 64
// bytes a column (32 or 64 depths) of one tap (a position of a convolution filter; a matrix has one tap),
//   [panel][tap][block][16 words of 32 bits][16 columns][2 or 4 depths],
// padded with zeros to an even number of panels. For int8, 128 times the sum of each column in int32 follows.
#pragma once

#include <cstring>
#include <mutex>
#include <new>

#include "common/op.h"

namespace sd_ort {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kBlockDepth = 32;  // of bfloat16, and units of 16 bits of int8
constexpr int64_t kBlockElements = kPanelColumns * kBlockDepth;

// Unpacked weights: weight (depth, tap, column) is data[depth * depth_stride + tap + column * column_stride].
struct WeightLayout {
  const void* data;
  DType dtype;  // float32 (rounded to bfloat16), bfloat16 or int8
  int64_t depth, taps, columns;
  int64_t depth_stride, column_stride;
  // Even panels hold columns of the left half and odd panels those of the right half, so that a pair has both operands
  // of GEGLU.
  bool halves = false;

  bool int8() const { return dtype == DType::kInt8; }
  int64_t blocks() const { return ceil_div(depth, int8() ? 2 * kBlockDepth : kBlockDepth); }
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

inline uint16_t packed_element(const WeightLayout& w, int64_t at, uint16_t) {
  return w.dtype == DType::kBFloat16 ? static_cast<const uint16_t*>(w.data)[at]
                                     : bfloat16_bits(static_cast<const float*>(w.data)[at]);
}
inline int8_t packed_element(const WeightLayout& w, int64_t at, int8_t) {
  return static_cast<const int8_t*>(w.data)[at];
}

template <class T>
void pack_panel(const WeightLayout& w, int64_t panel, T* to) {
  constexpr int64_t kWord = 4 / sizeof(T);  // depths
  const int64_t half = w.columns / 2;
  const int64_t first = w.halves ? panel / 2 * kPanelColumns + panel % 2 * half : panel * kPanelColumns;
  const int64_t columns = (w.halves && panel % 2 == 0 ? half : w.columns) - first;
  for (int64_t tap = 0; tap < w.taps; ++tap) {
    for (int64_t word = 0; word < w.blocks() * kBlockDepth / 2; ++word) {
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        for (int64_t d = word * kWord; d < (word + 1) * kWord; ++d, ++to) {
          const int64_t at = d * w.depth_stride + tap + (first + column) * w.column_stride;
          *to = d >= w.depth || column >= columns ? T{0} : packed_element(w, at, T{});
        }
      }
    }
  }
}

// Sets 128 times the sum of the weights of each column of a packed panel.
inline void sum_columns(const int8_t* panel, int64_t words, int32_t* to) {
  for (int64_t column = 0; column < kPanelColumns; ++column) to[column] = 0;
  for (int64_t i = 0; i < words * kPanelColumns; ++i) {
    for (int64_t k = 0; k < 4; ++k) to[i % kPanelColumns] += 128 * panel[4 * i + k];
  }
}

// Returns 128 times the sum of each column of packed int8 weights.
inline const int32_t* packed_offsets(const uint16_t* packed, int64_t panels, int64_t taps, int64_t blocks) {
  return reinterpret_cast<const int32_t*>(packed + panels * taps * blocks * kBlockElements);
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
      const int64_t offsets = weights.int8() ? panels * kPanelColumns * 2 : 0;  // in units of 16 bits
      const size_t bytes = static_cast<size_t>(panels * panel_size + offsets) * 2;
      data_ = static_cast<uint16_t*>(::operator new(bytes, kAlignment));
      if (bytes > 0) {
        parallel(static_cast<size_t>(panels), [&](size_t panel) {
          const int64_t index = static_cast<int64_t>(panel);
          uint16_t* to = data_ + index * panel_size;
          if (!weights.int8()) return pack_panel(weights, index, to);
          int8_t* elements = reinterpret_cast<int8_t*>(to);
          pack_panel(weights, index, elements);
          sum_columns(elements, panel_size / kPanelColumns / 2,
                      reinterpret_cast<int32_t*>(data_ + panels * panel_size) + index * kPanelColumns);
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
