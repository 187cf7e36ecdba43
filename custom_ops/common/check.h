// How code here reports what went wrong. Host code only.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sd_ort {

// Bindings check shapes and types with require(); the message reaches the user through ONNX Runtime's exception.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// a * b of sizes; refused where that is no size.
inline int64_t multiply_sizes(int64_t a, int64_t b) {
  int64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product), "a tensor would have more than 2^63 elements along an axis");
  return product;
}

}  // namespace sd_ort

// Kernels' host code returns null or a message: passes on the message of an expression that gives one.
#define SD_ORT_RETURN_ERROR(expression)                   \
  do {                                                    \
    if (const char* error_ = (expression)) return error_; \
  } while (false)
