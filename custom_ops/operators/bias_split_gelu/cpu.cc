// BiasSplitGelu on the CPU: rows are divided over the threads, in vectors of eight elements.
#include "common/cpu.h"

#include "operators/bias_split_gelu/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
void gate_row(const T* x, const T* bias, const QuantizedOutput<T>& y, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    store(y + i, (load(x + i) + load(bias + i)) * gelu(load(x + half + i) + load(bias + half + i)));
  }
  const int64_t rest = half - i;
  if (rest > 0) {
    const Floats left = load_some(x + i, rest) + load_some(bias + i, rest);
    const Floats right = load_some(x + half + i, rest) + load_some(bias + half + i, rest);
    store_some(y + i, left * gelu(right), rest);
  }
}

template <class T>
void run(const BiasSplitGeluParams& p, const Parallel& parallel) {
  const int64_t rows_a_task = rows_per_task(2 * p.half);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      gate_row(static_cast<const T*>(p.x) + row * 2 * p.half, static_cast<const T*>(p.bias),
               QuantizedOutput<T>(p.y, p.quantized) + row * p.half, p.half);
    }
  });
}

}  // namespace

void bias_split_gelu(const BiasSplitGeluParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
