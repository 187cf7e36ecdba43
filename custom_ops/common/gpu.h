// HIP and CUDA under one set of names. The only file that knows which of the two compiles it.
//
// Element types are half_t and bf16_t; arithmetic is done in float through to_float / from_float. Nothing here fixes
// the wave size on the host: 64 lanes on CDNA (gfx9), 32 on RDNA and NVIDIA, known to device code as kWaveSize.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/op.h"

#if defined(__HIP__) || defined(__HIPCC__) || defined(__HIP_PLATFORM_AMD__)
#define SD_ORT_HIP 1
#define SD_ORT_HAS_CLUSTERS 0
#define SD_ORT_HAS_WARPGROUPS 0
#include <hip/hip_runtime.h>
// hip_runtime.h declares the stream, event and launch functions; half needs no header, clang has _Float16.
#define SD_ORT_GPU_NAME(name) hip##name
#else
#define SD_ORT_HIP 0
#define SD_ORT_HAS_CLUSTERS 1
#define SD_ORT_HAS_WARPGROUPS 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define SD_ORT_GPU_NAME(name) cuda##name
#endif

namespace sd_ort {

using gpuStream_t = SD_ORT_GPU_NAME(Stream_t);
using gpuEvent_t = SD_ORT_GPU_NAME(Event_t);
using gpuError_t = SD_ORT_GPU_NAME(Error_t);
constexpr gpuError_t gpuSuccess = SD_ORT_GPU_NAME(Success);

#if SD_ORT_HIP
using half_t = _Float16;

// bfloat16 as its 16 bits: the same code on every clang and architecture.
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
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // keep NaN a NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};                  // to nearest even
}
#else
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
#endif

__device__ inline float to_float(float x) { return x; }
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}

// Lanes in a wave, for device code. Not a host constant: one host binary serves wave32 and wave64 devices.
#if SD_ORT_HIP && defined(__GFX9__)
#define SD_ORT_WAVE_SIZE 64
#else
#define SD_ORT_WAVE_SIZE 32
#endif

// The largest number of waves in a block of `threads`, over all devices: sizes shared arrays on the host and the
// device.
__host__ __device__ constexpr int max_waves(int threads) { return (threads + 31) / 32; }

__device__ inline float shuffle_xor(float value, int mask) {
#if SD_ORT_HIP
  return __shfl_xor(value, mask, SD_ORT_WAVE_SIZE);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

__device__ inline float shuffle(float value, int lane) {
#if SD_ORT_HIP
  return __shfl(value, lane, SD_ORT_WAVE_SIZE);
#else
  return __shfl_sync(0xffffffffu, value, lane);
#endif
}

// The block's threads meet; what they stored in LDS before, all of them see after. Promises nothing of global memory:
// __syncthreads() does, and on RDNA that empties a cache.
__device__ inline void block_barrier() {
#if SD_ORT_HIP && !defined(SD_ORT_EMULATED) && defined(__clang__) && __clang_major__ >= 19
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
  __syncthreads();
#endif
}

// N elements moved by one load or store; N * sizeof(T) is 2, 4, 8 or 16 bytes and the address is aligned to it.
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
#if SD_ORT_HIP
  using type = uint32_t __attribute__((ext_vector_type(2)));  // not HIP's uint2: its union costs copies
#else
  using type = uint2;
#endif
};
template <>
struct Bytes<16> {
#if SD_ORT_HIP
  using type = uint32_t __attribute__((ext_vector_type(4)));
#else
  using type = uint4;
#endif
};

// Makes the compiler forget what it knows of a register's value, so that it computes a thing again rather than hold it.
#if defined(SD_ORT_EMULATED)
template <class Raw>
void forget(Raw&) {}
#elif SD_ORT_HIP
template <class Raw>
__device__ inline void forget(Raw& value) {
  asm volatile("" : "+v"(value));
}
#else
__device__ inline void forget(uint16_t& value) { asm volatile("" : "+h"(value)); }
__device__ inline void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ inline void forget(uint2& value) { asm volatile("" : "+r"(value.x), "+r"(value.y)); }
__device__ inline void forget(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}
#endif

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

// Host: the text of the last launch's error, or null.
inline const char* launch_error() {
  const gpuError_t error = SD_ORT_GPU_NAME(GetLastError)();
  return error == gpuSuccess ? nullptr : SD_ORT_GPU_NAME(GetErrorString)(error);
}

// Device: the block's dynamic LDS, as many bytes as the launch gives, as T*.
#if defined(SD_ORT_EMULATED)
#define SD_ORT_DYNAMIC_LDS(T, name) T* const name = reinterpret_cast<T*>(emulator::dynamic_lds())
#else
#define SD_ORT_DYNAMIC_LDS(T, name)                              \
  extern __shared__ __align__(1024) unsigned char dynamic_lds[]; \
  T* const name = reinterpret_cast<T*>(dynamic_lds)
#endif

// Host: runs kernel<<<grid, block, lds_bytes, stream>>>(arguments...); null, or what went wrong. Dynamic LDS over
// 48 KB is asked for as NVIDIA wants it; AMD needs no such call.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t lds_bytes, void* stream,
                   Arguments... arguments) {
#if !SD_ORT_HIP
  if (lds_bytes > 48 * 1024) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(lds_bytes));
  }
#endif
#if defined(SD_ORT_EMULATED)
  // tests/gpu_emulator
  emulator::launch(grid, block, 1, lds_bytes, [=] { kernel(static_cast<Parameters>(arguments)...); });
#else
  // clang-format off
  kernel<<<grid, block, lds_bytes, static_cast<gpuStream_t>(stream)>>>(static_cast<Parameters>(arguments)...);
  // clang-format on
#endif
  return launch_error();
}

#if !SD_ORT_HIP
// Host: the current device's compute capability, its first number; 0 when there is no device.
inline int compute_capability() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 0;
  return major;
}

// Host: launch() in clusters of `cluster` neighbouring blocks along x. Compute capability 9 and newer.
template <class... Parameters, class... Arguments>
const char* launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, size_t lds_bytes,
                            void* stream, Arguments... arguments) {
#if defined(SD_ORT_EMULATED)
  emulator::launch(grid, block, cluster, lds_bytes, [=] { kernel(static_cast<Parameters>(arguments)...); });
#else
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(lds_bytes));
  if (cluster > 8) cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = lds_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#endif
  return launch_error();
}
#endif

// Host: function(Type<T>()) for the element type of a number.
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

// Host: function(Access<T, kVec>()) for an element type and the bytes of an access: one element to 16 bytes.
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
    return "no access of this size";
  });
}

}  // namespace sd_ort
