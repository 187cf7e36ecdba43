// What the provider's files share of ONNX Runtime's C API. Exceptions end in guarded(): none crosses the boundary.
#pragma once

#include <string>

#include "common/ort_op.h"
#include "onnxruntime_c_api.h"

namespace sd_ort {

static_assert(ORT_API_VERSION >= 26, "the provider needs the headers of ONNX Runtime 1.26 or later");

// Set by CreateEpFactories, beside ort_api.
inline const OrtEpApi* ep_api = nullptr;

// Owns what ONNX Runtime made and one of its functions releases.
template <class T>
class Owned {
 public:
  using Release = void(ORT_API_CALL*)(T*);

  explicit Owned(Release release) : release_(release) {}
  ~Owned() {
    if (value_ != nullptr) release_(value_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T** out() { return &value_; }
  T* get() const { return value_; }

 private:
  Release release_;
  T* value_ = nullptr;
};

}  // namespace sd_ort
