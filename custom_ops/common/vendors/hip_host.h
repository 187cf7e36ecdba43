// Host code for Windows by clang for MinGW, with kernels that were compiled on Linux: declares what the host's pass
// parses of kernels. HIP's header for kernels takes long for 64 bits there, unless the compiler is Microsoft's.
#pragma once

#include <hip/amd_detail/host_defines.h>

#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

#include "common/vendors/hip_runtime.h"

extern const __device__ dim3 blockIdx, blockDim, gridDim, threadIdx;
__device__ void __syncthreads();
__device__ float __uint_as_float(uint32_t bits);
__device__ uint32_t __float_as_uint(float value);
template <class T>
__device__ T __shfl(T value, int lane, int width);
template <class T>
__device__ T __shfl_xor(T value, int mask, int width);
template <class A, class B>
__device__ auto min(A a, B b) -> decltype(a + b);
template <class A, class B>
__device__ auto max(A a, B b) -> decltype(a + b);
__device__ float rsqrtf(float x);

extern "C" {  // what <cmath> and <cstring> declare for the host
__device__ void* memcpy(void* to, const void* from, size_t bytes);
__device__ float cosf(float x);
__device__ float erff(float x);
__device__ float exp2f(float x);
__device__ float expf(float x);
__device__ float fabsf(float x);
__device__ float floorf(float x);
__device__ float logf(float x);
__device__ float rintf(float x);
__device__ float sinf(float x);
__device__ float sqrtf(float x);
__device__ float tanhf(float x);
__device__ float copysignf(float x, float y);
__device__ float fmaxf(float x, float y);
__device__ float fminf(float x, float y);
__device__ float powf(float x, float y);
__device__ float fmaf(float x, float y, float z);
}
