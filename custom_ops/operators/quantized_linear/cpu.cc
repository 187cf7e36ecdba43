// QuantizedLinear on the CPU: int8 by tiles, with sums in integers. float8 is decoded to float, and its sums are of
// vectors of floats along the depth: the reference of the GPU's kernels, not a fast kernel.
#include "common/float8.h"
#include "common/tile_matmul.h"
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

void decode(const void* from, int64_t count, float* to) {
  static const Float8Table table;
  const uint8_t* elements = static_cast<const uint8_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = table.values[elements[i]];
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
void run_float8(const QuantizedLinearParams& p, const Parallel& parallel) {
  const int64_t stride = ceil_div(p.inner, kLanes) * kLanes, width = p.y_columns();
  parallel(ceil_div(p.rows, kRows), [&](size_t task) {
    static thread_local ThreadScratch<float> scratch;
    const int64_t first = static_cast<int64_t>(task) * kRows, rows = p.rows - first < kRows ? p.rows - first : kRows;
    float* const x = scratch.get((kRows + 1) * stride);
    float* const w = x + kRows * stride;
    memset(x, 0, (kRows + 1) * stride * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      decode(static_cast<const char*>(p.x) + (first + r) * p.inner, p.inner, x + r * stride);
    }
    const T* const bias = static_cast<const T*>(p.bias);
    const T* const skip = static_cast<const T*>(p.skip);
    const QuantizedOutput<T> y(p.y, p.quantized);
    const auto column_sums = [&](int64_t column, float* sums) {
      decode(static_cast<const char*>(p.weight) + column * p.inner, p.inner, w);
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

// Packs rows `row` to `row` + 31 of X as [block of depths][row][64 bytes]; beyond the last row and column anything may
// be.
void pack_rows(const QuantizedLinearParams& p, int64_t row, int64_t row_count, uint16_t* to) {
  constexpr int64_t kDepth = 2 * kBlockDepth;
  const int64_t rows = p.rows - row < kBlockRows ? p.rows - row : kBlockRows;
  for (int64_t r = 0; r < rows; ++r) {
    const int8_t* x = static_cast<const int8_t*>(p.x) + (row + r) * p.inner;
    for (int64_t depth = 0; depth < p.inner; depth += kDepth) {
      pack_bytes(x + depth, p.inner - depth, to + depth / kDepth * row_count * kBlockDepth + r * kBlockDepth);
    }
  }
}

inline Floats gelu_tanh(Floats x) {
  const Floats twice = 1.5957691f * (x + 0.044715f * x * x * x);
  return x - x / (1.f + exp(twice));
}

template <class T>
Floats load_up_to(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : load_some(from, count);
}

// Writes rows `row` to `row` + 31 of Y for the columns of panels `panel` and `panel` + 1.
template <class T>
void write(const QuantizedLinearParams& p, int64_t row, int64_t panel, const int32_t* sums) {
  const int64_t rows = p.rows - row < kBlockRows ? p.rows - row : kBlockRows;
  const int64_t width = p.y_columns(), columns = p.gated ? kPanelColumns : kBlockColumns;
  const QuantizedOutput<T> y(p.y, p.quantized);
  const auto scaled = [&](int64_t column, int64_t count) {
    const Floats scale = p.scales == 1 ? splat(*p.scale) : load_up_to(p.scale + column, count);
    const Floats bias = load_up_to(static_cast<const T*>(p.bias) + column, count);
    return [=](const int32_t* sum) { return __builtin_convertvector(load(sum), Floats) * scale + bias; };
  };
  for (int64_t part = 0, column = panel / 2 * columns; part < columns && column < width; part += kLanes) {
    const int64_t left = width - column;
    const auto value = scaled(column, left), gate = scaled(p.gated ? width + column : column, left);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* from = sums + r * kBlockColumns + part;
      const int64_t at = (row + r) * width + column;
      Floats result = value(from);
      if (p.skip != nullptr) result += load_up_to(static_cast<const T*>(p.skip) + at, left);
      if (p.gelu) result = gelu_tanh(result);
      if (p.gated) result *= gelu(gate(from + kPanelColumns));
      left >= kLanes ? store(y + at, result) : store_some(y + at, result, left);
    }
    column += kLanes;
  }
}

template <class T>
void run_int8(const QuantizedLinearParams& p, const Parallel& parallel) {
  const bool in_place = !adds_128() && p.inner % (2 * kBlockDepth) == 0;
  multiply_rows<int32_t>(
      {p.rows, ceil_div(p.inner, 2), p.columns, p.gated != 0, p.packed, in_place ? p.x : nullptr}, parallel,
      [&](int64_t row, int64_t row_count, uint16_t* to) { pack_rows(p, row, row_count, to); },
      [&](int64_t row, int64_t panel, const int32_t* sums) { write<T>(p, row, panel, sums); });
}

}  // namespace

void quantized_linear(const QuantizedLinearParams& params, const Parallel& parallel) {
  if (params.rows == 0 || params.columns == 0) return;
  by_type(params.dtype, [&](auto sample) {
    using T = decltype(sample);
    params.eight_bits == DType::kInt8 ? run_int8<T>(params, parallel) : run_float8<T>(params, parallel);
  });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
