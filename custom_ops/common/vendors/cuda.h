// NVIDIA: what common/gpu.h needs of CUDA. The only file that knows NVIDIA's architectures.
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

// In a pass of the compiler that makes code for the device (PTX can be had): its architecture, as 900. Else 0.
#define SD_ORT_HIP_CODE 0
#if defined(__CUDA_ARCH__)
#define SD_ORT_CUDA_CODE __CUDA_ARCH__
#else
#define SD_ORT_CUDA_CODE 0
#endif

// Lanes of a wave, and the matrix instructions of common/mma.h and common/wgmma.h: without the latter the kernels that
// use them are empty, and the host does not launch them.
#define SD_ORT_WAVE_SIZE 32
#define SD_ORT_MMA_NVIDIA 1
#if defined(SD_ORT_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SD_ORT_WGMMA 1
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

// The block's threads meet; what they stored in LDS before, all of them see after.
__device__ inline void block_barrier() { __syncthreads(); }

// The same for a wave's lanes.
__device__ inline void wave_barrier() { __syncwarp(); }
// The wave's number in its block, for the compiler the same in all lanes.
__device__ inline int wave_id() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

// Two and four registers.
using TwoRegisters = uint2;
using FourRegisters = uint4;

// Makes the compiler not know any more what a register holds, so that it computes a thing again rather than keep it.
#if defined(SD_ORT_EMULATED)
template <class Raw>
void launder(Raw&) {}
#else
__device__ inline void launder(uint16_t& value) { asm volatile("" : "+h"(value)); }
__device__ inline void launder(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ inline void launder(uint2& value) { asm volatile("" : "+r"(value.x), "+r"(value.y)); }
__device__ inline void launder(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}
#endif

// 1 / x to about 1 unit in the last place; subnormal numbers count as zero.
__device__ inline float reciprocal(float x) {
#if SD_ORT_CUDA_CODE
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// 2^x to about 2 units in the last place; 0 where that is subnormal, infinity beyond the largest.
__device__ inline float power_of_two(float x) {
#if SD_ORT_CUDA_CODE
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// A kernel begins while the one before it in the stream ends ("programmatic dependent launch", captured graphs too), so
// that its launch costs nothing. What that one wrote can be read, and what it reads be written, after this call only:
// it is the first statement of every kernel.
__device__ inline void wait_for_predecessor() {
#if SD_ORT_CUDA_CODE >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if !defined(SD_ORT_EMULATED)
// Host: launches in clusters of `cluster` neighboring blocks along x; 1 for none.
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, size_t lds_bytes, void* stream,
                   Parameters... arguments) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};     // ascending
  constexpr bool kMayBeginEarly = kArchitectures[0] >= 900;  // all of the library's code waits
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = lds_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (kMayBeginEarly) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& together = attributes[config.numAttrs++];
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchKernelEx(&config, kernel, arguments...);
}
#endif

// Host: has a kernel take so many bytes of dynamic LDS, which over 48 KB needs to be asked for.
inline void allow_lds(const void* kernel, size_t bytes) {
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
}

// Host: the current device's compute capability, its first number; 0 when there is no device.
inline int compute_capability() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 0;
  return major;
}

// Host: how many of them the current device has; 0 when there is no device.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
}

// The provider for this vendor: its name, the vendor's PCI id and name.
constexpr const char* gpuProviderName = "SdOrtCuda";
constexpr uint32_t gpuVendorId = 0x10DE;
constexpr const char* gpuVendorName = "NVIDIA";

inline cudaError_t gpuMallocPinned(void** data, size_t bytes) {
  return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}
inline cudaError_t gpuFreePinned(void* data) { return cudaFreeHost(data); }

using gpuDeviceProp_t = cudaDeviceProp;

// Host: the architecture as compilers name it: sm_90.
inline std::string arch_name(const gpuDeviceProp_t& properties) {
  return "sm_" + std::to_string(properties.major * 10 + properties.minor);
}

}  // namespace sd_ort
