// Matrix multiplication of CPU kernels by the blocks of tiles.h: rows are packed, then multiplied block by block.
#pragma once

#include "common/tiles.h"

namespace sd_ort {
namespace SD_ORT_ISA {

struct TileMatMul {
  int64_t rows, depths, columns;  // depths in units of 16 bits
  bool halves;                    // whether panels are those of WeightLayout::halves
  const uint16_t* packed;         // weights
  const void* complete;           // rows of complete blocks that are read in place; null if all are packed
};

// Columns in steps of two panels.
inline int64_t panel_pairs(const TileMatMul& p) {
  return p.halves ? ceil_div(p.columns / 2, kPanelColumns) : ceil_div(p.columns, kBlockColumns);
}

// Calls pack(row, row_count, to), which stores rows `row` to `row` + 31 as [block of depths][row][64 bytes] with
// row_count rows a block, then write(row, panel, sums) for each block of products.
template <class Sum, class Pack, class Write>
void multiply_rows(const TileMatMul& p, const Parallel& parallel, const Pack& pack, const Write& write) {
  constexpr int64_t kCachedElements = 1 << 19;  // weights that fit the cache of a core: 1 MiB
  static thread_local ThreadScratch<uint16_t> scratch;
  const Tasks tasks(p.rows, 2 * panel_pairs(p));
  const int64_t blocks = ceil_div(p.depths, kBlockDepth);
  const int64_t first = p.complete == nullptr ? 0 : p.rows / kBlockRows;  // first block of rows that is packed
  const int64_t row_count = (tasks.row_blocks - first) * kBlockRows;
  uint16_t* rows = scratch.get(blocks * row_count * kBlockDepth);
  if (row_count > 0) {
    parallel(tasks.row_blocks - first, [&](size_t block) {
      const int64_t row = static_cast<int64_t>(block) * kBlockRows;
      pack(first * kBlockRows + row, row_count, rows + row * kBlockDepth);
    });
  }
  GemmBlock packed = {rows, p.packed, row_count * kBlockDepth, kBlockDepth, blocks, 1, {}};
  GemmBlock unpacked = {static_cast<const uint16_t*>(p.complete), p.packed, kBlockDepth, p.depths, blocks, 1, {}};
  packed.offsets = unpacked.offsets = packed_offsets(p.packed, 2 * tasks.pairs, 1, blocks);
  const bool by_rows = tasks.pairs_per_task * blocks * 2 * kBlockElements < kCachedElements;
  parallel(tasks.count(), [&](size_t task) {
    const TileScope tiles;
    alignas(64) Sum sums[kBlockRows * kBlockColumns];
    tasks.run(static_cast<int64_t>(task), by_rows, [&](int64_t block, int64_t panel) {
      block < first ? multiply_block(unpacked, block * kBlockRows, panel, sums)
                    : multiply_block(packed, (block - first) * kBlockRows, panel, sums);
      write(block * kBlockRows, panel, sums);
    });
  });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
