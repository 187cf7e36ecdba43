// Stands in for CUDA's header when a kernel is emulated.
#pragma once

#include "emulator.h"

#define EMULATED(name) cuda##name
#include "runtime.h"

struct cudaDeviceProp {
  int major = 0, minor = 0;
};
inline int cudaGetDeviceProperties(cudaDeviceProp*, int) { return 0; }
constexpr int cudaHostAllocDefault = 0;
inline int cudaHostAlloc(void** to, size_t bytes, int) { return cudaMalloc(to, bytes); }
inline int cudaFreeHost(void* data) { return cudaFree(data); }
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
inline int cudaFuncSetAttribute(const void*, int, int) { return 0; }
constexpr int cudaDevAttrComputeCapabilityMajor = 75;
constexpr int cudaDevAttrMultiProcessorCount = 16;
inline int cudaDeviceGetAttribute(int* value, int attribute, int) {
  return *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : 9, 0;
}
