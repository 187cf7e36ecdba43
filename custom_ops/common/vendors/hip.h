// HIP implementation of common/gpu.h. Only this file names AMD architectures.
#pragma once

#if !defined(SD_ORT_EMULATED)
#include "common/vendors/hip_runtime.h"
#endif
#if defined(__MINGW32__)
#include "common/vendors/hip_host.h"
#else
#include <hip/hip_runtime.h>  // half needs no header: clang has _Float16
#endif

#include <cstdint>
#include <string>

#define SD_ORT_GPU_NAME(name) hip##name
#define SD_ORT_DEVICE __device__ inline
#define SD_ORT_HAS_CLUSTERS 0
#define SD_ORT_HAS_WARPGROUPS 0

// Whether this is a device compilation pass, which has the builtins.
#define SD_ORT_CUDA_CODE 0
#if defined(__HIP_DEVICE_COMPILE__)
#define SD_ORT_HIP_CODE 1
#else
#define SD_ORT_HIP_CODE 0
#endif

// Wave size, and the matrix instructions of common/mma.h.
#if defined(__GFX9__)
#define SD_ORT_WAVE_SIZE 64
#define SD_ORT_MMA_CDNA 1
#if defined(__gfx908__)  // matrix instructions write to AGPRs alone, and all else has the other half of the registers
#define SD_ORT_ACCUMULATORS_APART 1
#endif
#elif defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1033__) ||       \
    defined(__gfx1034__) || defined(__gfx1035__) || defined(__gfx1036__) || defined(__gfx10_3_generic__) || \
    defined(SD_ORT_DOT_PRODUCTS)  // which tests set, to run RDNA2's products on an emulated gfx1100
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_RDNA2 1
#elif defined(__GFX11__)
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_RDNA3 1
#elif defined(__GFX12__)
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_RDNA4 1
#elif SD_ORT_HIP_CODE
#error "no kernel is written for this AMD target: custom_ops/amd_targets.py lists those that are supported"
#else
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_NVIDIA 1  // parsed in the host pass
#endif
// gfx9-4-generic has no float8, whose format differs between gfx942 and gfx950.
#if defined(__gfx942__) || defined(__gfx950__) || defined(__GFX12__)
#define SD_ORT_MMA_FLOAT8 1
#endif

namespace sd_ort {

using half_t = _Float16;

// bfloat16 as its 16 bits, for the same code on every clang and architecture.
struct bf16_t {
  uint16_t bits;
};

__device__ inline float to_float(half_t x) { return static_cast<float>(x); }
__device__ inline float to_float(bf16_t x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline half_t from_float<half_t>(float x) {
  return static_cast<half_t>(x);
}
template <>
__device__ inline bf16_t from_float<bf16_t>(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};                  // to nearest even
}

__device__ inline float shuffle_xor(float value, int mask) { return __shfl_xor(value, mask, SD_ORT_WAVE_SIZE); }
__device__ inline float shuffle(float value, int lane) { return __shfl(value, lane, SD_ORT_WAVE_SIZE); }

// Block barrier: LDS stores before it are visible to all threads after it. Does not order global memory, unlike
// __syncthreads(), which invalidates a cache on RDNA.
__device__ inline void block_barrier() {
#if !defined(SD_ORT_EMULATED) && defined(__clang__) && __clang_major__ >= 19
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
  __syncthreads();
#endif
}

// Two and four registers. HIP's uint2 and uint4 are unions, which cost register copies.
using TwoRegisters = uint32_t __attribute__((ext_vector_type(2)));
using FourRegisters = uint32_t __attribute__((ext_vector_type(4)));

// Hides the value of a register from the compiler, so that it recomputes a value instead of keeping it.
template <class Raw>
__device__ inline void launder(Raw& value) {
#if !defined(SD_ORT_EMULATED)
  asm volatile("" : "+v"(value));
#endif
}

// 1 / x with an error of about 1 unit in the last place; subnormal values count as zero.
__device__ inline float reciprocal(float x) {
#if SD_ORT_HIP_CODE
  return __builtin_amdgcn_rcpf(x);
#else
  return 1.f / x;
#endif
}

// 2^x with an error of about 2 units in the last place; 0 if the result is subnormal, infinity on overflow.
__device__ inline float power_of_two(float x) {
#if SD_ORT_HIP_CODE
  return __builtin_amdgcn_exp2f(x);
#else
  return exp2f(x);
#endif
}

// First statement of every kernel. On AMD a kernel starts after its predecessor in the stream has ended.
__device__ inline void wait_for_predecessor() {}

// Host: multiprocessor count of the current device, as HIP counts them: CDNA's compute units, and RDNA's pairs of them.
// 0 without a device.
inline int multiprocessors() {
#if defined(SD_ORT_EMULATED)
  return 0;
#else
  int device = 0;
  hipDeviceProp_t properties;
  if (hipGetDevice(&device) != hipSuccess || hipGetDeviceProperties(&properties, device) != hipSuccess) return 0;
  return properties.multiProcessorCount;
#endif
}

#if !defined(SD_ORT_EMULATED)
// Host: launches a kernel; the cluster size is always 1.
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, int, size_t lds_bytes, void* stream,
                   Parameters... arguments) {
  // clang-format off
  kernel<<<grid, block, lds_bytes, static_cast<hipStream_t>(stream)>>>(arguments...);
  // clang-format on
}
#endif

// Host: permits a kernel this much dynamic LDS; no call is required on AMD.
inline void allow_lds(const void*, size_t) {}

// Provider name, PCI vendor id and vendor name.
constexpr const char* gpuProviderName = "SdOrtHip";
constexpr uint32_t gpuVendorId = 0x1002;
constexpr const char* gpuVendorName = "AMD";

inline hipError_t gpuMallocPinned(void** data, size_t bytes) {
  return hipHostMalloc(data, bytes, hipHostMallocDefault);
}
inline hipError_t gpuFreePinned(void* data) { return hipHostFree(data); }

using gpuDeviceProp_t = hipDeviceProp_t;

// Host: architecture name of compilers without features: gfx90a of gfx90a:sramecc+:xnack-.
inline std::string arch_name(const gpuDeviceProp_t& properties) {
  const std::string name = properties.gcnArchName;
  return name.substr(0, name.find(':'));
}

}  // namespace sd_ort
