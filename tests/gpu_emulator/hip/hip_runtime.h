// Stands in for ROCm's header when a kernel is emulated.
#pragma once

#include "../emulator.h"

#define EMULATED(name) hip##name
#include "../runtime.h"

struct hipDeviceProp_t {
  char gcnArchName[16] = "gfx000";
};
inline int hipGetDeviceProperties(hipDeviceProp_t*, int) { return 0; }
constexpr int hipHostMallocDefault = 0;
inline int hipHostMalloc(void** to, size_t bytes, int) { return hipMalloc(to, bytes); }
inline int hipHostFree(void* data) { return hipFree(data); }
