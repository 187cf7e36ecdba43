// BiasAdd(X, bias, skip?) -> Y: X + bias + skip. X, skip and Y are (N, S, C), bias is (C). As com.microsoft::BiasAdd,
// with an optional skip.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct BiasAddParams {
  DType dtype;
  const void* x;     // (rows, channels)
  const void* bias;  // (channels)
  const void* skip;  // (rows, channels) or null
  void* y;           // (rows, channels)
  int64_t rows;      // N * S
  int64_t channels;  // C

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(rows) + "x" + std::to_string(channels) +
           (skip == nullptr ? "_no_skip" : "");
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(rows * channels), dtype}}; }
};

struct BiasAddConfig {
  bool vectors;  // accesses of 16 bytes, which sizes and addresses must allow; else of one element
  int block;     // threads: 128, 256 or 512; 256 without vectors
};

// Configuration of the default candidate, which other operators use.
BiasAddConfig bias_add_default(const BiasAddParams& params);

const char* bias_add_launch(const BiasAddParams& params, const BiasAddConfig& config, void* stream);

}  // namespace sd_ort
