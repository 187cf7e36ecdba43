// Bfloat16MatMul on the CPU: the rows are rounded and put in order, then multiplied block by block.
#include "bfloat16_matmul/op.h"
#include "common/bfloat16.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kCached = 1 << 19;  // weights that stay in a core's cache while its rows go by: 1 MiB

// Rows `row` .. `row` + 31 of X, zeros behind its last row and column.
void pack_rows(const Bfloat16MatMulParams& p, int64_t row, int64_t row_count, uint16_t* to) {
  for (int64_t r = row; r < row + kBlockRows; ++r) {
    const float* x = static_cast<const float*>(p.x) + r * p.inner;
    uint16_t* at = to + r * kBlockDepth;
    for (int64_t depth = 0; depth < p.inner; depth += kBlockDepth, at += row_count * kBlockDepth) {
      for (int64_t i = 0; i < kBlockDepth; i += kLanes) {
        const int64_t left = r < p.rows ? p.inner - depth - i : 0;
        store_bfloat16(at + i, left >= kLanes ? load(x + depth + i) : load_some(x + depth + i, left > 0 ? left : 0));
      }
    }
  }
}

void write(const Bfloat16MatMulParams& p, int64_t row, int64_t column, const float* sums) {
  const int64_t rows = p.rows - row < kBlockRows ? p.rows - row : kBlockRows;
  for (int64_t part = 0; part < kBlockColumns; part += kLanes) {
    const int64_t left = p.columns - column - part;
    if (left <= 0) return;
    const float* bias = p.bias == nullptr ? nullptr : static_cast<const float*>(p.bias) + column + part;
    const Floats added = bias == nullptr ? Floats{} : left >= kLanes ? load(bias) : load_some(bias, left);
    for (int64_t r = 0; r < rows; ++r) {
      float* y = static_cast<float*>(p.y) + (row + r) * p.columns + column + part;
      const Floats sum = load(sums + r * kBlockColumns + part) + added;
      left >= kLanes ? store(y, sum) : store_some(y, sum, left);
    }
  }
}

}  // namespace

void bfloat16_matmul(const Bfloat16MatMulParams& p, const Parallel& parallel) {
  static thread_local Kept kept;
  const Tasks tasks(p.rows, 2 * ceil_div(p.columns, kBlockColumns));
  const int64_t row_count = tasks.row_blocks * kBlockRows, blocks = ceil_div(p.inner, kBlockDepth);
  uint16_t* rows = kept.get(blocks * row_count * kBlockDepth);
  parallel(tasks.row_blocks,
           [&](size_t block) { pack_rows(p, static_cast<int64_t>(block) * kBlockRows, row_count, rows); });
  const Product product = {rows, p.packed, row_count, blocks, 1, {}};
  const bool by_rows = tasks.pairs_per_task * blocks * 2 * kBlockNumbers < kCached;
  parallel(tasks.count(), [&](size_t task) {
    const Tiles tiles;
    alignas(64) float sums[kBlockRows * kBlockColumns];
    tasks.run(static_cast<int64_t>(task), by_rows, [&](int64_t block, int64_t panel) {
      multiply_block(product, block * kBlockRows, panel, sums);
      write(p, block * kBlockRows, panel * kPanelColumns, sums);
    });
  });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
