// Stands in for ROCm's header when a kernel is emulated.
#pragma once

#include "../emulator.h"

using hipStream_t = void*;
using hipEvent_t = void*;
enum hipError_t { hipSuccess };
inline hipError_t hipGetLastError() { return hipSuccess; }
inline const char* hipGetErrorString(hipError_t) { return ""; }
