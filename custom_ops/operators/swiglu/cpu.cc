// SwiGlu on the CPU: rows are divided over the threads, in vectors of eight elements.
#include "common/cpu.h"

#include "operators/swiglu/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
void gate_row(const T* gate, const T* up, const QuantizedOutput<T>& y, int64_t columns) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) store(y + i, silu(load(gate + i)) * load(up + i));
  const int64_t rest = columns - i;
  if (rest > 0) store_some(y + i, silu(load_some(gate + i, rest)) * load_some(up + i, rest), rest);
}

template <class T>
void run(const SwiGluParams& p, const Parallel& parallel) {
  const int64_t rows_a_task = rows_per_task(2 * p.columns);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      gate_row(static_cast<const T*>(p.gate) + row * p.stride, static_cast<const T*>(p.up) + row * p.stride,
               QuantizedOutput<T>(p.y, p.quantized) + row * p.columns, p.columns);
    }
  });
}

}  // namespace

void swiglu(const SwiGluParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
