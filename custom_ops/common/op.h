// Types shared by the ONNX Runtime bindings, the CPU and GPU kernels, and Python (through ctypes). Independent of ONNX
// Runtime, HIP and CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace sd_ort {

// Element type codes; custom_ops/operator_spec.py mirrors them.
// kFloat8 (e4m3fn) and kInt8 are the elements of quantized operands, never the DType of a call.
enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3, kInt8 = 4 };

inline size_t size_of(DType type) {
  return type == DType::kFloat32 ? 4 : type == DType::kFloat8 || type == DType::kInt8 ? 1 : 2;
}

inline const char* name_of(DType type) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8", "int8"};
  return kNames[static_cast<int32_t>(type)];
}

// NMSE a product of sums in float8's units: NVIDIA's keep 14 bits of the largest of 32 products and the sum so far
// (Hopper, of which DeepSeek-V3's report tells, arXiv 2412.19437, 3.3.2). Simulated with normal, GELU's and SwiGLU's
// activations it is 4e-10 to 8e-10. Operands that are rounded to float8 have 1e-3.
constexpr double kFloat8SumNmse = 3e-9;

// An output buffer that the tuner compares between candidates; data is null if the output is not requested.
struct Output {
  void* data;
  size_t count;
  DType dtype;
  double nmse = 0;  // normalized squared error between right candidates, where it is more than the dtype's
};

// Whether every pointer (null included) is a multiple of kBytes.
template <size_t kBytes, class... Pointers>
bool are_aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kBytes == 0) && ...);
}

// An output in float8 (e4m3fn) beside or instead of Y: Y / scale, rounded to nearest even and saturated. `data` is null
// if it is not requested.
struct Float8Output {
  void* data;
  float scale;

  // Suffix of a call's signature; `y` is null if Y itself is not requested.
  const char* suffix(const void* y) const { return data == nullptr ? "" : y == nullptr ? "_float8" : "_and_float8"; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A thread pool: parallel(count, body) runs body(i) for i in [0, count) and returns when all have finished.
class Parallel {
 public:
  using Body = void (*)(void* context, size_t i);
  using Run = void (*)(void* pool, Body body, size_t count, void* context);

  Parallel(Run run, void* pool) : run_(run), pool_(pool) {}

  template <class F>
  void operator()(size_t count, F&& body) const {
    using Function = typename std::remove_reference<F>::type;
    run_(pool_, [](void* context, size_t i) { (*static_cast<Function*>(context))(i); }, count, &body);
  }

 private:
  Run run_;
  void* pool_;
};

}  // namespace sd_ort
