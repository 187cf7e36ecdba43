// How code here reports what went wrong. Host code only.
#pragma once

#include <stdexcept>
#include <string>

namespace sd_ort {

// Bindings check shapes and types with require(); the message reaches the user through ONNX Runtime's exception.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace sd_ort

// Kernels' host code returns null or a message: passes on the message of an expression that gives one.
#define SD_ORT_RETURN_ERROR(expression)                   \
  do {                                                    \
    if (const char* error_ = (expression)) return error_; \
  } while (false)
