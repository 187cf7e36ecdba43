// Helpers for ONNX Runtime's C API. guarded() turns exceptions into OrtStatus: none crosses the C boundary.
#pragma once

#include <string>
#include <vector>

#include "common/ort_op.h"
#include "onnxruntime_c_api.h"

namespace sd_ort {

static_assert(ORT_API_VERSION >= 26, "the provider needs the headers of ONNX Runtime 1.26 or later");

// Set by CreateEpFactories together with ort_api.
inline const OrtEpApi* ep_api = nullptr;

// Releases an ONNX Runtime object on destruction.
template <class T>
class OrtHandle {
 public:
  using Release = void(ORT_API_CALL*)(T*);

  explicit OrtHandle(Release release) : release_(release) {}
  ~OrtHandle() {
    if (value_ != nullptr) release_(value_);
  }
  OrtHandle(const OrtHandle&) = delete;
  OrtHandle& operator=(const OrtHandle&) = delete;
  T** out() { return &value_; }
  T* get() const { return value_; }

 private:
  Release release_;
  T* value_ = nullptr;
};

// Returns the name of a kernel input or output. `get` is ort_api->KernelInfo_GetInputName or KernelInfo_GetOutputName.
template <class Get>
std::string name_by(Get get, const OrtKernelInfo* info, size_t index) {
  size_t bytes = 0;
  check(get(info, index, nullptr, &bytes));
  std::vector<char> name(bytes);
  check(get(info, index, name.data(), &bytes));
  return name.data();
}

}  // namespace sd_ort
