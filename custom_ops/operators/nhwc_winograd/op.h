// NhwcWinograd: a 3 x 3 convolution of channels-last images (pads and strides 1) with 4/9 of the multiplications: tiles
// of 4 x 4 pixels and the filters are transformed, multiplied as 16 matrices, and the products make 2 x 2 pixels of Y.
// F(2 x 2, 3 x 3): Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
//
// `doubled`: every pixel is first repeated down and across. Of a tile's 4 x 4 pixels the middle ones are then alike,
// one of the four transforms of a line is 0 (the difference of the two), and 9 of the 16 products are left: a quarter
// of the multiplications.
//
// Not an operator of ONNX Runtime: torch and NhwcConv launch it, with filters that WinogradFilters made. Transformed
// pixels are sums of four, rounded to T: pixels of float16 must stay below 16000. In float16 the error is 3.0e-4, the
// direct convolution's 2.3e-4; doubled 4.4e-4 and 3.0e-4 (results/winograd_forms.md).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct NhwcWinogradParams {
  DType dtype;
  const void* x;        // (batch, height, width, channels)
  const void* filters;  // (side^2, filter_count, channels), of WinogradFilters with the same `doubled`
  const void* bias;     // (filter_count) or null
  const void* skip;     // as y, or null
  void* y;              // (batch, height, width, filter_count); doubled: (batch, 2 height, 2 width, filter_count)
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t channels;
  int64_t filter_count;
  int64_t doubled;  // 0 or 1

  int64_t side() const { return doubled == 0 ? 4 : 3; }  // matrices are this squared
  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels, filter_count}) text += "_" + std::to_string(size);
    if (doubled != 0) text += "_doubled";
    return text + (bias == nullptr ? "" : "_bias") + (skip == nullptr ? "" : "_skip");
  }
  std::vector<Output> outputs() const {
    const int64_t pixels = batch * height * width * (doubled == 0 ? 1 : 4);
    return {{y, static_cast<size_t>(pixels * filter_count), dtype}};
  }
};

// Some neighboring tiles, numbered as their first pixels of Y are: image, row, column.
struct WinogradPiece {
  int64_t first;
  int64_t tiles;
};
int64_t winograd_tiles(const NhwcWinogradParams& params);

// The kernels' sizes: one argument, thus a plain struct.
struct WinogradShape {
  int32_t height;  // of x
  int32_t width;
  int32_t first_tile;
};

// Transformed pixels of a piece, (side^2, tiles, channels).
const char* winograd_input_launch(const NhwcWinogradParams& params, const WinogradPiece& piece, void* transformed,
                                  void* stream);
// y of a piece from its products with the filters, (side^2, tiles, filter_count).
const char* winograd_output_launch(const NhwcWinogradParams& params, const WinogradPiece& piece, const void* products,
                                   void* stream);

}  // namespace sd_ort
