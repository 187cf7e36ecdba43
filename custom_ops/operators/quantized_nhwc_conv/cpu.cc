// QuantizedNhwcConv on the CPU, for the simulated device: one sum after another, a line of an image per thread.
#include "common/cpu.h"

#include "common/float8.h"
#include "operators/quantized_nhwc_conv/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

// Sum of the 3 x 3 window of a pixel.
float window_sum(const QuantizedNhwcConvParams& p, int64_t image, int64_t line, int64_t column, int64_t filter,
                 const float (&values)[256]) {
  const auto* x = static_cast<const uint8_t*>(p.x);
  const auto* filters = static_cast<const uint8_t*>(p.filters) + filter * p.inner();
  float sum = 0.f;
  for (int64_t tap = 0; tap < 9; ++tap) {
    const int64_t from_line = line + tap / 3 - 1, from_column = column + tap % 3 - 1;
    if (from_line < 0 || from_line >= p.height || from_column < 0 || from_column >= p.width) continue;
    const uint8_t* from = x + ((image * p.height + from_line) * p.width + from_column) * p.channels;
    for (int64_t c = 0; c < p.channels; ++c) sum += values[from[c]] * values[filters[tap * p.channels + c]];
  }
  return sum;
}

template <class T>
void run(const QuantizedNhwcConvParams& p, const Parallel& parallel) {
  float values[256];
  for (int bits = 0; bits < 256; ++bits) values[bits] = float8_to_float(static_cast<uint8_t>(bits));
  parallel(static_cast<size_t>(p.batch * p.height), [&](size_t row) {
    const int64_t image = static_cast<int64_t>(row) / p.height, line = static_cast<int64_t>(row) % p.height;
    for (int64_t column = 0; column < p.width; ++column) {
      for (int64_t filter = 0; filter < p.filter_count; ++filter) {
        const int64_t at = (static_cast<int64_t>(row) * p.width + column) * p.filter_count + filter;
        float value = window_sum(p, image, line, column, filter, values) * p.scale[p.scales == 1 ? 0 : filter] +
                      to_float(static_cast<const T*>(p.bias)[filter]);
        if (p.skip != nullptr) value += to_float(static_cast<const T*>(p.skip)[at]);
        static_cast<T*>(p.y)[at] = from_float<T>(value);
      }
    }
  });
}

}  // namespace

void quantized_nhwc_conv(const QuantizedNhwcConvParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
