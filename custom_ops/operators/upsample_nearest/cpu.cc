// UpsampleNearest on the CPU: rows are divided over the threads; a row of Y is computed once and then copied.
#include "common/cpu.h"

#include "operators/upsample_nearest/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

// Repeats each of `count` pixels of `pixel` bytes `times` times.
void repeat_pixels(const char* from, char* to, int64_t count, int64_t times, size_t pixel) {
  for (; count > 0; --count, from += pixel) {
    for (int64_t i = 0; i < times; ++i, to += pixel) memcpy(to, from, pixel);
  }
}

}  // namespace

void upsample_nearest(const UpsampleNearestParams& p, const Parallel& parallel) {
  const size_t pixel = p.channels * size_of(p.dtype);
  const size_t row_of_x = pixel * p.width, row_of_y = row_of_x * p.scale_width;
  if (row_of_x == 0) return;
  const char* x = static_cast<const char*>(p.x);
  char* y = static_cast<char*>(p.y);
  const int64_t rows_a_task = rows_per_task(p.width * p.scale_width * p.channels * p.scale_height);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      char* to = y + row * p.scale_height * row_of_y;
      repeat_pixels(x + row * row_of_x, to, p.width, p.scale_width, pixel);
      for (int64_t i = 1; i < p.scale_height; ++i) memcpy(to + i * row_of_y, to, row_of_y);
    }
  });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
