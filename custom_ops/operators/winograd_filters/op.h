// WinogradFilters: filters of a 3 x 3 convolution, transformed for NhwcWinograd. Not an operator of ONNX Runtime:
// callers of NhwcWinograd transform their weights once, or after they change.
//
// y[4 i + j] = (G w G^T)[i, j] for each filter and channel, with G of F(2, 3): Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", arXiv 1509.09308, section 4.1. Summed in float32, rounded once. For upsampled images
// only i and j of 0, 1 and 3, since the others meet zeros (nhwc_winograd/op.h).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct WinogradFiltersParams {
  DType dtype;
  const void* weight;  // (filters, 3, 3, channels)
  void* y;             // (16, filters, channels); upsampled: (9, filters, channels)
  int64_t filters;
  int64_t channels;
  int64_t upsampled;  // 0 or 1

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(filters) + "x" + std::to_string(channels) +
           (upsampled == 0 ? "" : "_upsampled");
  }
  std::vector<Output> outputs() const {
    return {{y, static_cast<size_t>((upsampled == 0 ? 16 : 9) * filters * channels), dtype}};
  }
};

const char* winograd_filters_launch(const WinogradFiltersParams& params, void* stream);

}  // namespace sd_ort
