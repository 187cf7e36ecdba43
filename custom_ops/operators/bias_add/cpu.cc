// BiasAdd on the CPU: rows are divided over the threads, in vectors of eight elements.
#include "common/cpu.h"

#include "operators/bias_add/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
void add_row(const T* x, const T* bias, const T* skip, T* y, int64_t channels) {
  int64_t c = 0;
  if (skip == nullptr) {
    for (; c + kLanes <= channels; c += kLanes) store(y + c, load(x + c) + load(bias + c));
    for (; c < channels; ++c) y[c] = from_float<T>(to_float(x[c]) + to_float(bias[c]));
    return;
  }
  for (; c + kLanes <= channels; c += kLanes) store(y + c, load(x + c) + load(bias + c) + load(skip + c));
  for (; c < channels; ++c) y[c] = from_float<T>(to_float(x[c]) + to_float(bias[c]) + to_float(skip[c]));
}

template <class T>
void run(const BiasAddParams& p, const Parallel& parallel) {
  const T* x = static_cast<const T*>(p.x);
  const T* bias = static_cast<const T*>(p.bias);
  const T* skip = static_cast<const T*>(p.skip);
  T* y = static_cast<T*>(p.y);
  const int64_t rows_a_task = rows_per_task(p.channels);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      const int64_t at = row * p.channels;
      add_row(x + at, bias, skip == nullptr ? nullptr : skip + at, y + at, p.channels);
    }
  });
}

}  // namespace

void bias_add(const BiasAddParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
