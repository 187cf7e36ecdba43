// HIP, CUDA and the simulated device under one set of names. common/vendors has a file per vendor.
//
// Element types are half_t and bf16_t; arithmetic is in float through to_float() and from_float(). Host code must not
// assume the wave size, which device code knows as SD_ORT_WAVE_SIZE: 64 lanes on CDNA (gfx9), 32 on RDNA and NVIDIA.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/op.h"
#include "common/vendors/which.h"

#if SD_ORT_SIMULATED
#include "common/vendors/simulated.h"
#elif SD_ORT_HIP
#include "common/vendors/hip.h"
#else
#include "common/vendors/cuda.h"
#endif

namespace sd_ort {

using gpuStream_t = SD_ORT_GPU_NAME(Stream_t);
using gpuEvent_t = SD_ORT_GPU_NAME(Event_t);
using gpuError_t = SD_ORT_GPU_NAME(Error_t);
constexpr gpuError_t gpuSuccess = SD_ORT_GPU_NAME(Success);

// int64_t and uint64_t in the parameters and template arguments of kernels: the same types on all systems. They are
// part of a kernel's symbol name, by which host code for Windows finds kernels that were compiled on Linux.
using kernel_int64_t = long long;
using kernel_uint64_t = unsigned long long;

// Host: calls function(Type<T>()) with the C++ type of a dtype.
template <class T>
struct Type {
  using type = T;
};
template <class F>
const char* with_type(DType dtype, F&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(Type<float>());
    case DType::kFloat16:
      return function(Type<half_t>());
    default:
      return function(Type<bf16_t>());
  }
}

#if !SD_ORT_SIMULATED
// Host: blocks that fill the current AMD device, with so many on each multiprocessor. NVIDIA's devices, and a process
// without a device, take the number that was measured on an H200.
inline int64_t blocks_that_fill(int per_multiprocessor, int64_t on_h200) {
  const int64_t blocks = kHip ? int64_t{per_multiprocessor} * multiprocessors() : on_h200;
  return blocks > 0 ? blocks : on_h200;
}

__device__ inline float to_float(float x) { return x; }
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}

// Largest number of waves in a block of `threads` on any device, which sizes shared arrays.
__host__ __device__ constexpr int max_waves(int threads) { return (threads + 31) / 32; }

// N elements that one load or store accesses; N * sizeof(T) is 2, 4, 8 or 16 bytes and the address is aligned to it.
template <int kBytes>
struct Bytes;
template <>
struct Bytes<2> {
  using type = uint16_t;
};
template <>
struct Bytes<4> {
  using type = uint32_t;
};
template <>
struct Bytes<8> {
  using type = TwoRegisters;
};
template <>
struct Bytes<16> {
  using type = FourRegisters;
};

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  using Raw = typename Bytes<sizeof(T) * N>::type;
  Raw raw;

  __device__ static Vec load(const T* from) { return {*reinterpret_cast<const Raw*>(from)}; }
  __device__ void store(T* to) const { *reinterpret_cast<Raw*>(to) = raw; }
  __device__ void unpack(float (&values)[N]) const {
    T items[N];
    memcpy(items, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = to_float(items[i]);
  }
  __device__ static Vec pack(const float (&values)[N]) {
    T items[N];
#pragma unroll
    for (int i = 0; i < N; ++i) items[i] = from_float<T>(values[i]);
    Vec packed;
    memcpy(&packed.raw, items, sizeof(packed.raw));
    return packed;
  }
};

// Adds the products of kVec adjacent elements, aligned to their size, to `sum`; `number` converts an element to float.
template <int kVec, class T, class Number>
__device__ inline float add_products(float sum, const T* a, const T* b, const Number& number) {
  T x[kVec], y[kVec];
  memcpy(x, __builtin_assume_aligned(a, sizeof(x)), sizeof(x));
  memcpy(y, __builtin_assume_aligned(b, sizeof(y)), sizeof(y));
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += number(x[i]) * number(y[i]);
  return sum;
}

// Host: returns the error message of the last launch, or null.
inline const char* launch_error() {
  const gpuError_t error = SD_ORT_GPU_NAME(GetLastError)();
  return error == gpuSuccess ? nullptr : SD_ORT_GPU_NAME(GetErrorString)(error);
}

#if !defined(SD_ORT_EMULATED)
// Host: whether a kernel has static LDS, which one whose body is empty on the current device has not.
template <class... Parameters>
bool has_static_lds(void (*kernel)(Parameters...)) {
  SD_ORT_GPU_NAME(FuncAttributes) attributes{};
  if (SD_ORT_GPU_NAME(FuncGetAttributes)(&attributes, reinterpret_cast<const void*>(kernel)) == gpuSuccess) {
    return attributes.sharedSizeBytes > 0;
  }
  static_cast<void>(SD_ORT_GPU_NAME(GetLastError)());
  return false;
}
#endif

// Device: declares `name` as T* to the dynamic LDS of the block.
#if defined(SD_ORT_EMULATED)
#define SD_ORT_DYNAMIC_LDS(T, name) T* const name = reinterpret_cast<T*>(emulator::dynamic_lds())
#else
#define SD_ORT_DYNAMIC_LDS(T, name)                              \
  extern __shared__ __align__(1024) unsigned char dynamic_lds[]; \
  T* const name = reinterpret_cast<T*>(dynamic_lds)
#endif

// Host: launches kernel(arguments...) on the grid; returns null or an error message.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t lds_bytes, void* stream,
                   Arguments... arguments) {
  allow_lds(reinterpret_cast<const void*>(kernel), lds_bytes);
#if defined(SD_ORT_EMULATED)
  // tests/gpu_emulator
  emulator::launch(grid, block, 1, lds_bytes, [=] { kernel(static_cast<Parameters>(arguments)...); });
#else
  launch_kernel(kernel, grid, block, 1, lds_bytes, stream, static_cast<Parameters>(arguments)...);
#endif
  return launch_error();
}

// Host: calls function(Access<T, kVec>()) for a dtype and an access size of one element to 16 bytes.
template <class T, int kElements>
struct Access {
  using type = T;
  static constexpr int kVec = kElements;
};
template <class F>
const char* with_vectors(DType dtype, int bytes, F&& function) {
  return with_type(dtype, [&](auto type) -> const char* {
    using T = typename decltype(type)::type;
    if (bytes == sizeof(T)) return function(Access<T, 1>());
    if (bytes == 2 * sizeof(T)) return function(Access<T, 2>());
    if (bytes == 4 * sizeof(T)) return function(Access<T, 4>());
    if constexpr (sizeof(T) == 2) {
      if (bytes == 8 * sizeof(T)) return function(Access<T, 8>());
    }
    return "unsupported access size";
  });
}

#endif

}  // namespace sd_ort
