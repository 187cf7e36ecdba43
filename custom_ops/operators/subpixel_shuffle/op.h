// SubpixelShuffle(X, bias?) -> Y: last step of a convolution of a 2x upsampled image. X (N, H + 1, W + 1, 4 C) holds
// the four phases of Y (N, 2 H, 2 W, C), C channels each: Y[2 i + p, 2 j + q] = X[i + p, j + q, phase 2 p + q] + bias.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct SubpixelShuffleParams {
  DType dtype;
  const void* x;     // (batch, height + 1, width + 1, 4, channels)
  const void* bias;  // (channels) or null
  void* y;           // (batch, height, 2, width, 2, channels)
  int64_t batch;
  int64_t height;    // H, before upsampling
  int64_t width;     // W
  int64_t channels;  // C, of Y

  bool is_empty() const { return batch == 0 || height == 0 || width == 0 || channels == 0; }
  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels}) text += "_" + std::to_string(size);
    return text + (bias == nullptr ? "" : "_bias");
  }
  std::vector<Output> outputs() const {
    return {{y, static_cast<size_t>(batch * height * 2 * width * 2 * channels), dtype}};
  }
};

// `vector_bytes`: access size, one element or 16 bytes; must divide the bytes of a pixel and the addresses.
const char* subpixel_shuffle_launch(const SubpixelShuffleParams& params, int vector_bytes, void* stream);

}  // namespace sd_ort
