// Bfloat16MatMul on the CPU: rows are rounded and packed. bfloat16 rows in complete blocks are read in place.
#include "common/tile_matmul.h"
#include "operators/bfloat16_matmul/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

// Packs rows `row` to `row` + 31 of X as [block of depths][row][32 depths], zeros beyond the last row and column.
template <class T>
void pack_rows(const Bfloat16MatMulParams& p, int64_t row, int64_t row_count, uint16_t* to) {
  for (int64_t r = row; r < row + kBlockRows; ++r) {
    const bool unpacked = r < p.rows;
    const T* x = static_cast<const T*>(p.x) + (unpacked ? r * p.inner : 0);
    uint16_t* at = to + (r - row) * kBlockDepth;
    for (int64_t depth = 0; depth < p.inner; depth += kBlockDepth, at += row_count * kBlockDepth) {
      round_row(x + depth, unpacked ? p.inner - depth : 0, at);
    }
  }
}

Floats load_bias(const Bfloat16MatMulParams& p, int64_t column, int64_t count) {
  if (p.bias == nullptr) return splat(0.f);
  const float* bias = static_cast<const float*>(p.bias) + column;
  return count >= kLanes ? load(bias) : load_some(bias, count);
}

// Writes rows `row` to `row` + 31 of Y for the columns of panels `panel` and `panel` + 1.
template <class Y>
void write(const Bfloat16MatMulParams& p, int64_t row, int64_t panel, const float* sums) {
  const int64_t rows = p.rows - row < kBlockRows ? p.rows - row : kBlockRows;
  const int64_t width = p.gated ? p.columns / 2 : p.columns, columns = p.gated ? kPanelColumns : kBlockColumns;
  const int64_t column = panel / 2 * columns;
  for (int64_t part = 0; part < columns && column + part < width; part += kLanes) {
    const int64_t left = width - column - part;
    const Floats added = load_bias(p, column + part, left);
    const Floats gate = p.gated ? load_bias(p, width + column + part, left) : splat(0.f);
    Y* y = static_cast<Y*>(p.y) + row * width + column + part;
    for (int64_t r = 0; r < rows; ++r, y += width, sums += kBlockColumns) {
      Floats sum = load(sums + part) + added;
      if (p.gated) sum *= gelu(load(sums + kPanelColumns + part) + gate);
      store_up_to(y, sum, left);
    }
    sums -= rows * kBlockColumns;
  }
}

}  // namespace

void bfloat16_matmul(const Bfloat16MatMulParams& p, const Parallel& parallel) {
  const bool in_place = p.dtype == DType::kBFloat16 && p.inner % kBlockDepth == 0;
  const auto pack = p.dtype == DType::kFloat32 ? pack_rows<float> : pack_rows<BFloat>;
  const auto put = p.y_dtype == DType::kFloat32 ? write<float> : write<BFloat>;
  multiply_rows<float>(
      {p.rows, p.inner, p.columns, p.gated != 0, p.packed, in_place ? p.x : nullptr}, parallel,
      [&](int64_t row, int64_t row_count, uint16_t* to) { pack(p, row, row_count, to); },
      [&](int64_t row, int64_t panel, const float* sums) { put(p, row, panel, sums); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
