// CUDA implementation of common/gpu.h. Only this file names NVIDIA architectures.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#define SD_ORT_GPU_NAME(name) cuda##name
#define SD_ORT_DEVICE __device__ inline
#define SD_ORT_HAS_CLUSTERS 1
#define SD_ORT_HAS_WARPGROUPS 1

// Architecture in a device compilation pass, such as 900; else 0.
#define SD_ORT_HIP_CODE 0
#if defined(__CUDA_ARCH__)
#define SD_ORT_CUDA_CODE __CUDA_ARCH__
#else
#define SD_ORT_CUDA_CODE 0
#endif

// Wave size, and the matrix instructions of common/mma.h and common/wgmma.h. Without SD_ORT_WGMMA the kernels that use
// it are empty, and the host does not launch them.
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_NVIDIA 1
#if defined(SD_ORT_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SD_ORT_WGMMA 1
#endif
#if defined(SD_ORT_EMULATED) || SD_ORT_CUDA_CODE >= 890
#define SD_ORT_MMA_FLOAT8 1
#endif

namespace sd_ort {

using half_t = __half;
using bf16_t = __nv_bfloat16;

__device__ inline float to_float(half_t x) { return __half2float(x); }
__device__ inline float to_float(bf16_t x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline half_t from_float<half_t>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline bf16_t from_float<bf16_t>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ inline float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
__device__ inline float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// Whether `predicate` holds in any lane of the wave.
__device__ inline bool any_lane(bool predicate) { return __any_sync(0xffffffffu, predicate); }

// Block barrier: LDS stores before it are visible to all threads after it.
__device__ inline void block_barrier() { __syncthreads(); }

// Barrier of the lanes of a wave.
__device__ inline void wave_barrier() { __syncwarp(); }
// Index of the wave in its block, uniform over its lanes for the compiler.
__device__ inline int wave_id() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

// Two and four registers.
using TwoRegisters = uint2;
using FourRegisters = uint4;

// Hides the value of a register from the compiler, so that it recomputes a value instead of keeping it.
#if defined(SD_ORT_EMULATED)
template <class Raw>
void launder(Raw&) {}
#else
__device__ inline void launder(uint16_t& value) { asm volatile("" : "+h"(value)); }
__device__ inline void launder(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ inline void launder(float& value) { asm volatile("" : "+f"(value)); }
__device__ inline void launder(uint2& value) { asm volatile("" : "+r"(value.x), "+r"(value.y)); }
__device__ inline void launder(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}
#endif

// 1 / x with an error of about 1 unit in the last place; subnormal values count as zero.
__device__ inline float reciprocal(float x) {
#if SD_ORT_CUDA_CODE
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// 2^x with an error of about 2 units in the last place; 0 if the result is subnormal, infinity on overflow.
__device__ inline float power_of_two(float x) {
#if SD_ORT_CUDA_CODE
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// First statement of every kernel. A kernel starts while its predecessor in the stream ends ("programmatic dependent
// launch", also in captured graphs), which hides its launch. Before this call it must neither read results of the
// predecessor nor overwrite its inputs.
__device__ inline void wait_for_predecessor() {
#if SD_ORT_CUDA_CODE >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if !defined(SD_ORT_EMULATED)
// Host: launches in clusters of `cluster` adjacent blocks along x; 1 means no cluster.
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, size_t lds_bytes, void* stream,
                   Parameters... arguments) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};     // ascending
  constexpr bool kCanStartEarly = kArchitectures[0] >= 900;  // every kernel of the library calls wait_for_predecessor()
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = lds_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (kCanStartEarly) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
    dimension.id = cudaLaunchAttributeClusterDimension;
    dimension.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchKernelEx(&config, kernel, arguments...);
}
#endif

// Host: permits a kernel this much dynamic LDS, which is required above 48 KB.
inline void allow_lds(const void* kernel, size_t bytes) {
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
}

// Host: major compute capability of the current device; 0 without a device.
inline int compute_capability() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 0;
  return major;
}

// Host: multiprocessor count of the current device; 0 without a device.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
}

// Provider name, PCI vendor id and vendor name.
constexpr const char* gpuProviderName = "SdOrtCuda";
constexpr uint32_t gpuVendorId = 0x10DE;
constexpr const char* gpuVendorName = "NVIDIA";

inline cudaError_t gpuMallocPinned(void** data, size_t bytes) {
  return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}
inline cudaError_t gpuFreePinned(void* data) { return cudaFreeHost(data); }

using gpuDeviceProp_t = cudaDeviceProp;

// Host: architecture name of compilers, such as sm_90.
inline std::string arch_name(const gpuDeviceProp_t& properties) {
  return "sm_" + std::to_string(properties.major * 10 + properties.minor);
}

}  // namespace sd_ort
