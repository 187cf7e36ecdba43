// Error reporting of host code.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace sd_ort {

// Throws std::invalid_argument; ONNX Runtime passes the message to the user.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// Multiplies a size by a positive number; throws on overflow.
inline int64_t multiply_sizes(int64_t size, int64_t times) {
  require(size <= std::numeric_limits<int64_t>::max() / times,
          "a tensor would have more than 2^63 elements along an axis");
  return size * times;
}

}  // namespace sd_ort

// Host code of kernels returns null or an error message: returns the message of `expression` if there is one.
#define SD_ORT_RETURN_ERROR(expression)                                   \
  do {                                                                    \
    if (const char* returned_error = (expression)) return returned_error; \
  } while (false)
