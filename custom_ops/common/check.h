// How code here reports what went wrong. Host code only.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace sd_ort {

// Bindings check shapes and types with require(); the message reaches the user through ONNX Runtime's exception.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// A size times a positive number; refused where that is no size.
inline int64_t multiply_sizes(int64_t size, int64_t times) {
  require(size <= std::numeric_limits<int64_t>::max() / times,
          "a tensor would have more than 2^63 elements along an axis");
  return size * times;
}

}  // namespace sd_ort

// Kernels' host code returns null or a message: passes on the message of an expression that gives one.
#define SD_ORT_RETURN_ERROR(expression)                   \
  do {                                                    \
    if (const char* error_ = (expression)) return error_; \
  } while (false)
