// QuantizedLinear on the CPU: the elements are decoded to float, and sums are of vectors of floats along the depth. The
// reference of the GPU's kernels, not a fast kernel.
#include "common/cpu.h"

#include "common/float8.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kRows = 32;  // of a task
constexpr int64_t kTile = 4;   // rows that a column is multiplied by at once

struct Float8Table {
  float values[256];
  Float8Table() {
    for (int bits = 0; bits < 256; ++bits) values[bits] = float8_to_float(static_cast<uint8_t>(bits));
  }
};

void decode(DType type, const void* from, int64_t count, float* to) {
  static const Float8Table table;
  if (type == DType::kInt8) {
    const int8_t* elements = static_cast<const int8_t*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(elements[i]);
  } else {
    const uint8_t* elements = static_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = table.values[elements[i]];
  }
}

// Sets sums[r] to the product of row r of x and w; rows are `stride` apart and padded with zeros to whole vectors.
void multiply(const float* x, int64_t rows, const float* w, int64_t stride, float* sums) {
  for (int64_t row = 0; row < rows; row += kTile) {
    Floats totals[kTile] = {};
    const int64_t count = rows - row < kTile ? rows - row : kTile;
    for (int64_t k = 0; k < stride; k += kLanes) {
      const Floats weights = load(w + k);
      for (int64_t r = 0; r < count; ++r) totals[r] += load(x + (row + r) * stride + k) * weights;
    }
    for (int64_t r = 0; r < count; ++r) sums[row + r] = sum(totals[r]);
  }
}

float gelu_tanh(float x) { return 0.5f * x * (1.f + __builtin_tanhf(0.79788456f * (x + 0.044715f * x * x * x))); }

template <class T>
void run(const QuantizedLinearParams& p, const Parallel& parallel) {
  if (p.rows == 0 || p.columns == 0) return;
  const int64_t stride = ceil_div(p.inner, kLanes) * kLanes, width = p.y_columns();
  parallel(ceil_div(p.rows, kRows), [&](size_t task) {
    static thread_local ThreadScratch<float> scratch;
    const int64_t first = static_cast<int64_t>(task) * kRows, rows = p.rows - first < kRows ? p.rows - first : kRows;
    float* const x = scratch.get((kRows + 1) * stride);
    float* const w = x + kRows * stride;
    memset(x, 0, (kRows + 1) * stride * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      decode(p.eight_bits, static_cast<const char*>(p.x) + (first + r) * p.inner, p.inner, x + r * stride);
    }
    const T* const bias = static_cast<const T*>(p.bias);
    const T* const skip = static_cast<const T*>(p.skip);
    const QuantizedOutput<T> y(p.y, p.quantized);
    const auto column_sums = [&](int64_t column, float* sums) {
      decode(p.eight_bits, static_cast<const char*>(p.weight) + column * p.inner, p.inner, w);
      multiply(x, rows, w, stride, sums);
      const float scale = p.scale[p.scales == 1 ? 0 : column], shift = to_float(bias[column]);
      for (int64_t r = 0; r < rows; ++r) sums[r] = sums[r] * scale + shift;
    };
    for (int64_t column = 0; column < width; ++column) {
      float sums[kRows], gates[kRows];
      column_sums(column, sums);
      if (p.gated) column_sums(column + width, gates);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (first + r) * width + column;
        float value = sums[r];
        if (skip != nullptr) value += to_float(skip[at]);
        if (p.gelu) value = gelu_tanh(value);
        if (p.gated) value *= 0.5f * gates[r] * (1.f + __builtin_erff(gates[r] * 0.70710678f));
        store_some(y + at, splat(value), 1);
      }
    }
  });
}

}  // namespace

void quantized_linear(const QuantizedLinearParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
