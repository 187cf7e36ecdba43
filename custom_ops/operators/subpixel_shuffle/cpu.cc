// SubpixelShuffle on the CPU: rows of Y are divided over the threads.
#include "common/cpu.h"

#include "operators/subpixel_shuffle/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
void copy_pixel(const T* x, const T* bias, T* y, int64_t channels) {
  if (bias == nullptr) {
    memcpy(y, x, channels * sizeof(T));
    return;
  }
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) store(y + c, load(x + c) + load(bias + c));
  for (; c < channels; ++c) y[c] = from_float<T>(to_float(x[c]) + to_float(bias[c]));
}

template <class T>
void run(const SubpixelShuffleParams& p, const Parallel& parallel) {
  if (p.is_empty()) return;
  const T* x = static_cast<const T*>(p.x);
  const T* bias = static_cast<const T*>(p.bias);
  T* y = static_cast<T*>(p.y);
  const int64_t rows = p.batch * p.height * 2, columns = p.width * 2;
  const int64_t rows_a_task = rows_per_task(columns * p.channels);
  parallel(ceil_div(rows, rows_a_task), [&](size_t task) {
    for (int64_t line = task * rows_a_task; line < rows && line < int64_t(task + 1) * rows_a_task; ++line) {
      const int64_t sample = line / (p.height * 2), row = line % (p.height * 2);
      const T* from = x + (sample * (p.height + 1) + (row + 1) / 2) * (p.width + 1) * 4 * p.channels;
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t phase = row % 2 * 2 + column % 2;
        copy_pixel(from + ((column + 1) / 2 * 4 + phase) * p.channels, bias, y + (line * columns + column) * p.channels,
                   p.channels);
      }
    }
  });
}

}  // namespace

void subpixel_shuffle(const SubpixelShuffleParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
