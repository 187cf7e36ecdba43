// Simulated libhipfft.so.0, librocm_smi64.so.1 and libroctracer64.so.4, one library for each macro: what
// onnxruntime-rocm 1.22.2 takes of them.
#include "library.h"

#if defined(SIMULATED_HIPFFT)
NOT_SIMULATED(hipfftCreate)
NOT_SIMULATED(hipfftSetStream)
NOT_SIMULATED(hipfftXtExec)
NOT_SIMULATED(hipfftXtMakePlanMany)
#elif defined(SIMULATED_ROCM_SMI)
#include <rocm_smi/rocm_smi.h>

SIMULATED_EXPORT rsmi_status_t rsmi_init(uint64_t) { return RSMI_STATUS_SUCCESS; }
SIMULATED_EXPORT rsmi_status_t rsmi_shut_down() { return RSMI_STATUS_SUCCESS; }

namespace {

// Memory of a device as the HIP runtime tells it; its current device stays.
rsmi_status_t read_memory(uint32_t device, size_t* free, size_t* total) {
  int current = 0;
  if (hipGetDevice(&current) != hipSuccess || hipSetDevice(static_cast<int>(device)) != hipSuccess) {
    return RSMI_STATUS_INVALID_ARGS;
  }
  const hipError_t error = hipMemGetInfo(free, total);
  (void)hipSetDevice(current);
  return error == hipSuccess ? RSMI_STATUS_SUCCESS : RSMI_STATUS_UNKNOWN_ERROR;
}

}  // namespace

SIMULATED_EXPORT rsmi_status_t rsmi_dev_memory_total_get(uint32_t device, rsmi_memory_type_t, uint64_t* total) {
  size_t free = 0, all = 0;
  const rsmi_status_t status = read_memory(device, &free, &all);
  *total = all;
  return status;
}
SIMULATED_EXPORT rsmi_status_t rsmi_dev_memory_usage_get(uint32_t device, rsmi_memory_type_t, uint64_t* used) {
  size_t free = 0, all = 0;
  const rsmi_status_t status = read_memory(device, &free, &all);
  *used = all - free;
  return status;
}
#elif !defined(SIMULATED_ROCTRACER)
#error "define SIMULATED_HIPFFT, SIMULATED_ROCM_SMI or SIMULATED_ROCTRACER"
#endif
