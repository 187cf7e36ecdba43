// Shared parts of the attention kernels on warpgroup instructions.
#pragma once

#include "common/wgmma.h"
#include "operators/multi_head_attention/kernels/attention.h"

#if SD_ORT_HAS_WARPGROUPS
namespace sd_ort {
namespace {

constexpr int kWarpgroupKeys = 64;  // per tile
__host__ __device__ constexpr int warpgroup_panels(int head) {
  return (head + wgmma::kPanelColumns - 1) / wgmma::kPanelColumns;
}

// Copies kRows rows and columns up to kColumns to swizzled panels; the rest of a panel is unchanged.
template <class T, int kRows, int kColumns, int kThreads>
class PanelTile {
 public:
  static constexpr int kPanelBytes = kRows * wgmma::kRowBytes;
  static constexpr int kBytes = warpgroup_panels(kColumns) * kPanelBytes;

  __device__ PanelTile() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int item = threadIdx.x + i * kThreads, piece = item % kPieces;
      row_[i] = item / kPieces;
      column_[i] = piece * 8;
      to_[i] = piece / 8 * kPanelBytes + wgmma::piece_offset(row_[i], piece % 8);
    }
  }
  // Rows and columns outside of `from` become zeros.
  __device__ void begin(char* lds, const Rows<T>& from) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool valid = from.holds(row_[i], column_[i]);
      const bool in_tile = kRows * kPieces % kThreads == 0 || row_[i] < kRows;
      mma::copy_16_bytes_async(lds + to_[i], from.at(valid ? from.offset(row_[i], column_[i]) : 0), valid, in_tile);
    }
  }

 private:
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kSteps = (kRows * kPieces + kThreads - 1) / kThreads;
  int row_[kSteps], column_[kSteps];
  uint32_t to_[kSteps];
};

}  // namespace
}  // namespace sd_ort
#endif
