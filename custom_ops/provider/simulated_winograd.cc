#include "provider/simulated_winograd.h"

#include "common/gpu.h"

namespace sd_ort {
namespace {

constexpr float kG[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
constexpr float kInverse[3][4] = {{1, 0, 0, 0}, {0, 1, -1, 0}, {0, 0, 0, 1}};  // kInverse kG = 1

// Strides in elements of a filter matrix (i, j); channels are contiguous.
struct Layout {
  int64_t i, j, filter;
};
Layout weight_layout(int64_t channels) { return {3 * channels, channels, 9 * channels}; }
Layout transformed_layout(int64_t filters, int64_t channels) {
  return {4 * filters * channels, filters * channels, channels};
}

// to = left * from * left^T of every filter and channel.
template <class T, int kTo, int kFrom>
void transform(const float (&left)[kTo][kFrom], const T* from, const Layout& read, T* to, const Layout& write,
               int64_t filters, int64_t channels) {
  for (int64_t at = 0; at < filters * channels; ++at) {
    const int64_t filter = at / channels, channel = at % channels;
    for (int i = 0; i < kTo; ++i) {
      for (int j = 0; j < kTo; ++j) {
        float sum = 0;
        for (int k = 0; k < kFrom; ++k) {
          for (int l = 0; l < kFrom; ++l) {
            sum += left[i][k] * left[j][l] * to_float(from[k * read.i + l * read.j + filter * read.filter + channel]);
          }
        }
        to[i * write.i + j * write.j + filter * write.filter + channel] = from_float<T>(sum);
      }
    }
  }
}

}  // namespace

void simulated_winograd_filters(const WinogradFiltersParams& p) {
  SD_ORT_ISA::by_type(p.dtype, [&](auto sample) {
    using T = decltype(sample);
    transform(kG, static_cast<const T*>(p.weight), weight_layout(p.channels), static_cast<T*>(p.y),
              transformed_layout(p.filters, p.channels), p.filters, p.channels);
  });
}

std::vector<char> inverse_winograd_filters(const NhwcConvParams& p) {
  std::vector<char> filters(9 * p.filter_count * p.channels * size_of(p.dtype));
  SD_ORT_ISA::by_type(p.dtype, [&](auto sample) {
    using T = decltype(sample);
    transform(kInverse, static_cast<const T*>(p.transformed_filters), transformed_layout(p.filter_count, p.channels),
              reinterpret_cast<T*>(filters.data()), weight_layout(p.channels), p.filter_count, p.channels);
  });
  return filters;
}

}  // namespace sd_ort
