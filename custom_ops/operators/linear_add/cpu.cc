// LinearAdd on the CPU: tiles of a few rows by two vectors of columns, summed in float. For completeness: ONNX
// Runtime's MatMul is faster, and CPU targets do not create this operator.
#include "common/cpu.h"

#include "operators/linear_add/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kColumns = 2 * kLanes;

template <class T>
Floats load_columns(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : load_some(from, count > 0 ? count : 0);
}

// GELU by tanh.
Floats gelu(Floats x) {
  for (int64_t i = 0; i < kLanes; ++i) {
    x[i] = 0.5f * x[i] * (1.f + __builtin_tanhf(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
  }
  return x;
}

// Computes Y[row : row + rows, column : column + columns].
template <class T>
void tile(const LinearAddParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const T* x = static_cast<const T*>(p.x) + row * p.inner;
  const T* weight = static_cast<const T*>(p.weight) + column;
  Floats sums[kRows][2] = {};
  for (int64_t k = 0; k < p.inner; ++k) {
    for (int64_t part = 0; part < 2; ++part) {
      const Floats w = load_columns(weight + k * p.columns + part * kLanes, columns - part * kLanes);
      for (int64_t r = 0; r < rows; ++r) sums[r][part] += splat(to_float(x[r * p.inner + k])) * w;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t part = 0; part < 2; ++part) {
      const int64_t left = columns - part * kLanes, at = column + part * kLanes;
      if (left <= 0) continue;
      const int64_t offset = (row + r) * p.columns + at;
      Floats sum = sums[r][part];
      if (p.bias != nullptr) sum += load_columns(static_cast<const T*>(p.bias) + at, left);
      if (p.skip != nullptr) sum += load_columns(static_cast<const T*>(p.skip) + offset, left);
      if (p.gelu) sum = gelu(sum);
      T* y = static_cast<T*>(p.y) + offset;
      left >= kLanes ? store(y, sum) : store_some(y, sum, left);
    }
  }
}

template <class T>
void run(const LinearAddParams& p, const Parallel& parallel) {
  if (p.columns == 0) return;
  parallel((p.rows + kRows - 1) / kRows, [&](size_t task) {
    const int64_t row = static_cast<int64_t>(task) * kRows;
    const int64_t rows = p.rows - row < kRows ? p.rows - row : kRows;
    for (int64_t column = 0; column < p.columns; column += kColumns) {
      tile<T>(p, row, rows, column, p.columns - column < kColumns ? p.columns - column : kColumns);
    }
  });
}

}  // namespace

void linear_add(const LinearAddParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
