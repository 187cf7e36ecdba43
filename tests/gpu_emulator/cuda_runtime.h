// Stands in for CUDA's header when a kernel is emulated.
#pragma once

#include "emulator.h"

using cudaStream_t = void*;
using cudaEvent_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
