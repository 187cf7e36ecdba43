// What the provider's files share of ONNX Runtime's C API. Exceptions end in guarded(): none crosses the boundary.
#pragma once

#include <string>
#include <vector>

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

// The name of a kernel's input or output, by `get`: ort_api->KernelInfo_GetInputName or KernelInfo_GetOutputName.
template <class Get>
std::string name_by(Get get, const OrtKernelInfo* info, size_t index) {
  size_t bytes = 0;
  check(get(info, index, nullptr, &bytes));
  std::vector<char> name(bytes);
  check(get(info, index, name.data(), &bytes));
  return name.data();
}

}  // namespace sd_ort
