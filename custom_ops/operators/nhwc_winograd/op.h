// NhwcWinograd: a 3 x 3 convolution of channels-last images (pads and strides 1) with 4/9 of the multiplications. Tiles
// of 4 x 4 pixels and the filters are transformed, multiplied as 16 matrices, and transformed back to 2 x 2 pixels of
// Y. F(2 x 2, 3 x 3): Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
//
// `upsampled`: X is upsampled 2x (nearest) first. The middle pixels of a tile are then equal, one of the four
// transforms of a line is 0 (their difference), and 9 of the 16 products remain: a quarter of the multiplications.
//
// Not an operator of ONNX Runtime: torch and NhwcConv launch it with filters from WinogradFilters. Transformed pixels
// are sums of four, rounded to T: float16 pixels must stay below 16000. The float16 error is 3.0e-4, that of the direct
// convolution 2.3e-4; upsampled 4.4e-4 and 3.0e-4 (results/gpu_experiments.md).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct NhwcWinogradParams {
  DType dtype;
  const void* x;        // (batch, height, width, channels)
  const void* filters;  // (side^2, filter_count, channels), from WinogradFilters with the same `upsampled`
  const void* bias;     // (filter_count) or null
  const void* skip;     // as y, or null
  void* y;              // (batch, height, width, filter_count); upsampled: (batch, 2 height, 2 width, filter_count)
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t channels;
  int64_t filter_count;
  int64_t upsampled;  // 0 or 1

  int64_t side() const { return upsampled == 0 ? 4 : 3; }  // there are side^2 matrices
  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels, filter_count}) text += "_" + std::to_string(size);
    if (upsampled != 0) text += "_upsampled";
    return text + (bias == nullptr ? "" : "_bias") + (skip == nullptr ? "" : "_skip");
  }
  std::vector<Output> outputs() const {
    const int64_t pixels = batch * height * width * (upsampled == 0 ? 1 : 4);
    return {{y, static_cast<size_t>(pixels * filter_count), dtype}};
  }
};

// A range of tiles, in the order of their first pixels of Y: image, row, column.
struct WinogradTiles {
  int64_t first;
  int64_t tiles;
};
int64_t winograd_tiles(const NhwcWinogradParams& params);

// Sizes as one kernel argument.
struct WinogradShape {
  int32_t height;  // of x
  int32_t width;
  int32_t first_tile;
};

// Writes the transformed pixels of a tile range, (side^2, tiles, channels).
const char* winograd_input_launch(const NhwcWinogradParams& params, const WinogradTiles& range, void* transformed,
                                  void* stream);
// Writes y of a tile range from its products with the filters, (side^2, tiles, filter_count).
const char* winograd_output_launch(const NhwcWinogradParams& params, const WinogradTiles& range, const void* products,
                                   void* stream);

}  // namespace sd_ort
