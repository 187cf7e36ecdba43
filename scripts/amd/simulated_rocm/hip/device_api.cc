// Exported functions of devices, versions and errors.
// clang-format off: HIP's headers in the order that they need
#include "call.h"

#include <hip/hip_deprecated.h>
// clang-format on

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include "memory.h"

// Libraries that HIP 5's headers compiled ask for the old struct by this name.
#undef hipGetDeviceProperties
extern "C" hipError_t hipGetDeviceProperties(hipDeviceProp_tR0000* properties, int device);

namespace simulated {

thread_local hipError_t last_error = hipSuccess;
thread_local int current_device = 0;

namespace {

bool is_device(int device) { return device >= 0 && device < settings().devices; }

// "gfx1100" is version 11.0; "gfx942" is 9.4.
int major_version() { return std::stoi(settings().target.substr(3, settings().target.size() - 5)); }
int minor_version() { return settings().target[settings().target.size() - 2] - '0'; }

int pci_bus(int device) { return 3 + device; }

// The fields that both versions of the struct have.
template <class Properties>
void fill_properties(Properties* properties, int device) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Simulated %s", settings().target.c_str());
  snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "%s%s", settings().target.c_str(),
           settings().features.c_str());
  properties->totalGlobalMem = settings().memory;
  properties->sharedMemPerBlock = settings().lds_bytes;
  properties->regsPerBlock = 65536;
  properties->warpSize = static_cast<int>(settings().wave_size);
  properties->maxThreadsPerBlock = 1024;
  std::fill_n(properties->maxThreadsDim, 3, 1024);
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65536;
  properties->clockRate = 2500000;
  properties->memoryClockRate = 1250000;
  properties->memoryBusWidth = 256;
  properties->totalConstMem = 2147483647;
  properties->major = major_version();
  properties->minor = minor_version();
  properties->multiProcessorCount = static_cast<int>(settings().compute_units);
  properties->l2CacheSize = 6 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->clockInstructionRate = 100000;
  properties->concurrentKernels = 1;
  properties->pciBusID = pci_bus(device);
  properties->maxSharedMemoryPerMultiProcessor = settings().lds_bytes;
  properties->canMapHostMemory = 1;
  properties->isMultiGpuBoard = settings().devices > 1;
  properties->textureAlignment = 256;
  properties->memPitch = 2147483647;
}

// Runs `write`, which writes what is asked of a device to `to`.
template <class To, class Write>
hipError_t describe(const char* function, const To* to, int device, Write write) {
  return call(function, [&] {
    if (to == nullptr) return hipErrorInvalidValue;
    if (!is_device(device)) return hipErrorInvalidDevice;
    write();
    return hipSuccess;
  });
}

// The value of an attribute, none if it is not simulated.
std::optional<int> attribute_of(const hipDeviceProp_tR0600& properties, hipDeviceAttribute_t attribute) {
  switch (attribute) {
    case hipDeviceAttributeWarpSize:
      return properties.warpSize;
    case hipDeviceAttributeMultiprocessorCount:
      return properties.multiProcessorCount;
    case hipDeviceAttributeMaxThreadsPerBlock:
    case hipDeviceAttributeMaxBlockDimX:
    case hipDeviceAttributeMaxBlockDimY:
    case hipDeviceAttributeMaxBlockDimZ:
      return properties.maxThreadsPerBlock;
    case hipDeviceAttributeMaxGridDimX:
      return properties.maxGridSize[0];
    case hipDeviceAttributeMaxGridDimY:
    case hipDeviceAttributeMaxGridDimZ:
      return properties.maxGridSize[1];
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(properties.sharedMemPerBlock);
    case hipDeviceAttributeMaxThreadsPerMultiProcessor:
      return properties.maxThreadsPerMultiProcessor;
    case hipDeviceAttributeMaxRegistersPerBlock:
      return properties.regsPerBlock;
    case hipDeviceAttributeComputeCapabilityMajor:
      return properties.major;
    case hipDeviceAttributeComputeCapabilityMinor:
      return properties.minor;
    case hipDeviceAttributeClockRate:
      return properties.clockRate;
    case hipDeviceAttributeMemoryClockRate:
      return properties.memoryClockRate;
    case hipDeviceAttributeL2CacheSize:
      return properties.l2CacheSize;
    case hipDeviceAttributePciBusId:
      return properties.pciBusID;
    case hipDeviceAttributePciDeviceId:
    case hipDeviceAttributePciDomainID:
    case hipDeviceAttributeIntegrated:
    case hipDeviceAttributeManagedMemory:
    case hipDeviceAttributeConcurrentManagedAccess:
    case hipDeviceAttributeMemoryPoolsSupported:
      return 0;
    default:
      return std::nullopt;
  }
}

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

hipError_t hipInit(unsigned flags) {
  return call(__func__, [&] { return flags == 0 ? hipSuccess : hipErrorInvalidValue; });
}

hipError_t hipGetDeviceCount(int* count) {
  count_call(__func__);
  if (count == nullptr) return keep_error(hipErrorInvalidValue);
  *count = settings().devices;
  return keep_error(*count == 0 ? hipErrorNoDevice : hipSuccess);
}

hipError_t hipGetDevice(int* device) {
  return call(__func__, [&] {
    if (device == nullptr) return hipErrorInvalidValue;
    *device = current_device;
    return hipSuccess;
  });
}

hipError_t hipSetDevice(int device) {
  return call(__func__, [&] {
    if (!is_device(device)) return hipErrorInvalidDevice;
    current_device = device;
    return hipSuccess;
  });
}

hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  return describe(__func__, device, ordinal, [&] { *device = ordinal; });
}

hipError_t hipDeviceGetName(char* name, int length, hipDevice_t device) {
  return describe(__func__, length > 0 ? name : nullptr, device,
                  [&] { snprintf(name, length, "Simulated %s", settings().target.c_str()); });
}

hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
  return describe(__func__, bytes, device, [&] { *bytes = settings().memory; });
}

hipError_t hipDeviceGetPCIBusId(char* id, int length, int device) {
  return describe(__func__, length >= 13 ? id : nullptr, device,
                  [&] { snprintf(id, length, "0000:%02x:00.0", pci_bus(device)); });
}

hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  return describe(__func__, properties, device, [&] {
    fill_properties(properties, device);
    properties->sharedMemPerMultiprocessor = settings().lds_bytes;
    properties->asyncEngineCount = 2;
    properties->unifiedAddressing = 1;
  });
}

hipError_t hipGetDevicePropertiesR0000(hipDeviceProp_tR0000* properties, int device) {
  return describe(__func__, properties, device, [&] { fill_properties(properties, device); });
}

hipError_t hipGetDeviceProperties(hipDeviceProp_tR0000* properties, int device) {
  return hipGetDevicePropertiesR0000(properties, device);
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return call(__func__, [&] {
    if (value == nullptr) return hipErrorInvalidValue;
    if (!is_device(device)) return hipErrorInvalidDevice;
    hipDeviceProp_tR0600 properties;
    fill_properties(&properties, device);
    const std::optional<int> result = attribute_of(properties, attribute);
    if (!result) {
      print_message("hipDeviceGetAttribute: attribute %d is not simulated.", static_cast<int>(attribute));
      return hipErrorInvalidValue;
    }
    *value = *result;
    return hipSuccess;
  });
}

hipError_t hipDeviceCanAccessPeer(int* can_access, int device, int peer) {
  return describe(__func__, can_access, is_device(peer) ? device : peer, [&] { *can_access = device != peer; });
}

hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call(__func__, [&] {
    if (flags != 0) return hipErrorInvalidValue;
    return is_device(peer) && peer != current_device ? hipSuccess : hipErrorInvalidDevice;
  });
}

hipError_t hipDeviceDisablePeerAccess(int peer) {
  return call(__func__, [&] { return is_device(peer) ? hipSuccess : hipErrorInvalidDevice; });
}

hipError_t hipDriverGetVersion(int* version) {
  count_call(__func__);
  if (version == nullptr) return keep_error(hipErrorInvalidValue);
  *version = HIP_VERSION;
  return hipSuccess;
}

hipError_t hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }

hipError_t hipMemGetInfo(size_t* available, size_t* total) {
  return call(__func__, [&] {
    if (available == nullptr || total == nullptr) return hipErrorInvalidValue;
    *available = free_memory(current_device);
    *total = settings().memory;
    return hipSuccess;
  });
}

hipError_t hipGetLastError(void) {
  count_call(__func__);
  const hipError_t status = last_error;
  last_error = hipSuccess;
  return status;
}

hipError_t hipPeekAtLastError(void) {
  count_call(__func__);
  return last_error;
}

const char* hipGetErrorName(hipError_t status) {
  switch (status) {
#define SIMULATED_NAME(name) \
  case name:                 \
    return #name;
    SIMULATED_NAME(hipSuccess)
    SIMULATED_NAME(hipErrorInvalidValue)
    SIMULATED_NAME(hipErrorOutOfMemory)
    SIMULATED_NAME(hipErrorInvalidConfiguration)
    SIMULATED_NAME(hipErrorInvalidMemcpyDirection)
    SIMULATED_NAME(hipErrorInvalidDeviceFunction)
    SIMULATED_NAME(hipErrorNoDevice)
    SIMULATED_NAME(hipErrorInvalidDevice)
    SIMULATED_NAME(hipErrorInvalidImage)
    SIMULATED_NAME(hipErrorNoBinaryForGpu)
    SIMULATED_NAME(hipErrorInvalidHandle)
    SIMULATED_NAME(hipErrorIllegalState)
    SIMULATED_NAME(hipErrorNotFound)
    SIMULATED_NAME(hipErrorLaunchFailure)
    SIMULATED_NAME(hipErrorContextIsDestroyed)
    SIMULATED_NAME(hipErrorNotSupported)
    SIMULATED_NAME(hipErrorStreamCaptureUnsupported)
    SIMULATED_NAME(hipErrorStreamCaptureInvalidated)
    SIMULATED_NAME(hipErrorStreamCaptureUnmatched)
    SIMULATED_NAME(hipErrorStreamCaptureUnjoined)
    SIMULATED_NAME(hipErrorStreamCaptureIsolation)
    SIMULATED_NAME(hipErrorStreamCaptureImplicit)
    SIMULATED_NAME(hipErrorCapturedEvent)
    SIMULATED_NAME(hipErrorStreamCaptureWrongThread)
#undef SIMULATED_NAME
    default:
      return "hipErrorUnknown";
  }
}

const char* hipGetErrorString(hipError_t status) { return hipGetErrorName(status); }

}  // extern "C"
