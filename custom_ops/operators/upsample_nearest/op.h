// UpsampleNearest(X; scale_height, scale_width) -> Y: every pixel of X (N, H, W, C) repeated scale_height times down
// and scale_width times across. Y is (N, H * scale_height, W * scale_width, C).
#pragma once

#include "common/op.h"

namespace sd_ort {

struct UpsampleNearestParams {
  DType dtype;
  const void* x;         // (rows, width, channels)
  void* y;               // (rows, scale_height, width, scale_width, channels)
  int64_t rows;          // N * H
  int64_t width;         // W
  int64_t channels;      // C
  int64_t scale_height;  // 1 or more
  int64_t scale_width;   // 1 or more

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(width) + "x" +
           std::to_string(channels) + "_" + std::to_string(scale_height) + "x" + std::to_string(scale_width);
  }
  std::vector<Output> outputs() const {
    return {{y, static_cast<size_t>(rows * scale_height * width * scale_width * channels), dtype}};
  }
};

struct UpsampleNearestConfig {
  int vector_bytes;  // access size, one element to 16 bytes; must divide the bytes of a pixel and the addresses
  int block;         // threads: 256; also 128 or 512 with accesses of 16 bytes
};

const char* upsample_nearest_launch(const UpsampleNearestParams& params, const UpsampleNearestConfig& config,
                                    void* stream);

}  // namespace sd_ort
