// NhwcConv on the CPU: gathers the windows of an output row into a matrix and multiplies. CPU targets keep Conv, which
// is faster in ONNX Runtime; the simulated device runs this kernel.
#include "common/cpu.h"

#include <cstdlib>

#include "operators/nhwc_conv/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kPixels = 4;   // per register tile
constexpr int64_t kFilters = 2;  // per register tile

// Copies the window of a pixel as floats: (kernel_height, kernel_width, channels of the group), zeros outside the
// image.
template <class T>
void gather(const NhwcConvParams& p, int64_t image, int64_t row, int64_t column, int64_t group, float* window) {
  const int64_t channels = p.channels / p.groups;
  const T* x = static_cast<const T*>(p.x) + image * p.height * p.width * p.channels + group * channels;
  for (int64_t kh = 0; kh < p.kernel_height; ++kh) {
    const int64_t from_row = row * p.stride_height - p.pad_top + kh * p.dilation_height;
    for (int64_t kw = 0; kw < p.kernel_width; ++kw, window += channels) {
      const int64_t from_column = column * p.stride_width - p.pad_left + kw * p.dilation_width;
      const bool inside = from_row >= 0 && from_row < p.height && from_column >= 0 && from_column < p.width;
      const T* pixel = inside ? x + (from_row * p.width + from_column) * p.channels : nullptr;
      for (int64_t c = 0; c < channels; ++c) window[c] = inside ? to_float(pixel[c]) : 0.f;
    }
  }
}

// Computes sums[pixel][filter] of a tile over `depth` elements.
void multiply(const float* windows, const float* filters, int64_t depth, float (&sums)[kPixels][kFilters]) {
  Floats wide[kPixels][kFilters] = {};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    for (int64_t f = 0; f < kFilters; ++f) {
      const Floats weight = load(filters + f * depth + d);
      for (int64_t p = 0; p < kPixels; ++p) wide[p][f] += load(windows + p * depth + d) * weight;
    }
  }
  for (int64_t p = 0; p < kPixels; ++p) {
    for (int64_t f = 0; f < kFilters; ++f) {
      float total = sum(wide[p][f]);
      for (int64_t i = d; i < depth; ++i) total += windows[p * depth + i] * filters[f * depth + i];
      sums[p][f] = total;
    }
  }
}

template <class T>
void store_tile(const NhwcConvParams& p, int64_t pixel, int64_t pixels, int64_t filter, int64_t filters,
                const float (&sums)[kPixels][kFilters]) {
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t f = 0; f < filters; ++f) {
      const int64_t at = (pixel + i) * p.filter_count + filter + f;
      float value = sums[i][f];
      if (p.bias != nullptr) value += to_float(static_cast<const T*>(p.bias)[filter + f]);
      if (p.skip != nullptr) value += to_float(static_cast<const T*>(p.skip)[at]);
      if (p.relu != 0 && value < 0.f) value = 0.f;  // keeps NaN
      static_cast<T*>(p.y)[at] = from_float<T>(value);
    }
  }
}

// Computes one output row of one group. `windows` has room for out_width + kPixels windows.
template <class T>
void run_row(const NhwcConvParams& p, int64_t row, int64_t group, const float* filters, float* windows) {
  const int64_t depth = p.inner();
  const int64_t count = p.filter_count / p.groups;
  for (int64_t column = 0; column < p.out_width; ++column) {
    gather<T>(p, row / p.out_height, row % p.out_height, column, group, windows + column * depth);
  }
  float sums[kPixels][kFilters];
  for (int64_t f = 0; f < count; f += kFilters) {
    for (int64_t column = 0; column < p.out_width; column += kPixels) {
      multiply(windows + column * depth, filters + f * depth, depth, sums);
      const int64_t pixels = p.out_width - column < kPixels ? p.out_width - column : kPixels;
      store_tile<T>(p, row * p.out_width + column, pixels, group * count + f,
                    count - f < kFilters ? count - f : kFilters, sums);
    }
  }
}

float* zeros(int64_t count) { return static_cast<float*>(std::calloc(count > 0 ? count : 1, sizeof(float))); }

template <class T>
void run(const NhwcConvParams& p, const Parallel& parallel) {
  const int64_t depth = p.inner();
  const int64_t count = p.filter_count / p.groups;
  float* filters = zeros((p.filter_count + kFilters) * depth);
  const T* source = static_cast<const T*>(p.filters);
  for (int64_t i = 0; i < p.filter_count * depth; ++i) filters[i] = to_float(source[i]);
  parallel(p.batch * p.out_height, [&](size_t row) {
    float* windows = zeros((p.out_width + kPixels) * depth);
    for (int64_t group = 0; group < p.groups; ++group) {
      run_row<T>(p, row, group, filters + group * count * depth, windows);
    }
    std::free(windows);
  });
  std::free(filters);
}

}  // namespace

void nhwc_conv(const NhwcConvParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
