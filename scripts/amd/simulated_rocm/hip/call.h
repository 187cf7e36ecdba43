// The frame of every exported function: counts the call, and keeps the last error as HIP 7 does.
#pragma once

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include "report.h"
#include "settings.h"

namespace simulated {

// Last error of the calling thread. A call that succeeds leaves it as it is.
extern thread_local hipError_t last_error;
// Device of the calling thread.
extern thread_local int current_device;

inline hipError_t keep_error(hipError_t status) {
  if (status != hipSuccess && status != hipErrorNotReady) last_error = status;
  return status;
}

// Runs the body of a function that needs a device.
template <class Body>
hipError_t call(const char* function, Body body) {
  count_call(function);
  return keep_error(settings().devices == 0 ? hipErrorNoDevice : body());
}

}  // namespace simulated
