// Stands in for ROCm's header when a kernel is emulated.
#pragma once

#include "../emulator.h"

#define EMULATED(name) hip##name
#include "../runtime.h"

struct hipDeviceProp_t {
  char gcnArchName[16] = "gfx000";
};
inline int hipGetDeviceProperties(hipDeviceProp_t*, int) { return 0; }
