// Functions of the HIP runtime, looked up at their first call: no library of sd-ort links to the runtime, so one binary
// runs with every ROCm version and loads on machines without ROCm. Host code.
#pragma once

#define __HIP_DISABLE_CPP_FUNCTIONS__  // overloads, which would hide the types of the C functions
#include <hip/hip_runtime_api.h>

#include <atomic>
#include <string>
#include <type_traits>

namespace sd_ort {

// Returns why the runtime could not be loaded and what to install, or null if it is loaded.
const char* missing_hip_runtime();

// Returns the path of the loaded runtime; empty without one.
const std::string& hip_runtime_path();

// Returns the address of a function of the runtime, or null.
void* find_hip_function(const char* name);

// A function of the runtime. Without it a call does nothing: it returns hipErrorSharedObjectInitFailed, the reason in
// place of a text, or null.
template <class Function>
class HipFunction;
template <class Result, class... Parameters>
class HipFunction<Result(Parameters...)> {
 public:
  constexpr explicit HipFunction(const char* name) : name_(name) {}

  Result operator()(Parameters... arguments) {
    void* address = address_.load(std::memory_order_relaxed);
    if (address == nullptr) {
      address = find_hip_function(name_);
      address_.store(address, std::memory_order_relaxed);
    }
    if (address != nullptr) return reinterpret_cast<Result (*)(Parameters...)>(address)(arguments...);
    if constexpr (std::is_same_v<Result, hipError_t>) return hipErrorSharedObjectInitFailed;
    if constexpr (std::is_same_v<Result, const char*>) return missing_hip_runtime();
    return Result();
  }

 private:
  const char* name_;
  std::atomic<void*> address_{nullptr};
};

// In namespace sd_ort these names hide the functions of HIP's headers. A header may define one as a macro, for another
// version of the function: hipGetDeviceProperties.
#define SD_ORT_HIP_NAME(name) #name
#define SD_ORT_HIP_FUNCTION(name) inline HipFunction<decltype(::name)> name(SD_ORT_HIP_NAME(name))
SD_ORT_HIP_FUNCTION(hipDeviceCanAccessPeer);
SD_ORT_HIP_FUNCTION(hipDeviceEnablePeerAccess);
SD_ORT_HIP_FUNCTION(hipDriverGetVersion);
SD_ORT_HIP_FUNCTION(hipEventCreate);
SD_ORT_HIP_FUNCTION(hipEventCreateWithFlags);
SD_ORT_HIP_FUNCTION(hipEventDestroy);
SD_ORT_HIP_FUNCTION(hipEventElapsedTime);
SD_ORT_HIP_FUNCTION(hipEventRecord);
SD_ORT_HIP_FUNCTION(hipEventSynchronize);
SD_ORT_HIP_FUNCTION(hipFree);
SD_ORT_HIP_FUNCTION(hipGetDevice);
SD_ORT_HIP_FUNCTION(hipGetDeviceCount);
SD_ORT_HIP_FUNCTION(hipGetDeviceProperties);
SD_ORT_HIP_FUNCTION(hipGetErrorString);
SD_ORT_HIP_FUNCTION(hipGetLastError);
SD_ORT_HIP_FUNCTION(hipGraphDestroy);
SD_ORT_HIP_FUNCTION(hipGraphExecDestroy);
SD_ORT_HIP_FUNCTION(hipGraphInstantiateWithFlags);
SD_ORT_HIP_FUNCTION(hipGraphLaunch);
SD_ORT_HIP_FUNCTION(hipHostFree);
SD_ORT_HIP_FUNCTION(hipHostMalloc);
SD_ORT_HIP_FUNCTION(hipMalloc);
SD_ORT_HIP_FUNCTION(hipMemGetInfo);
SD_ORT_HIP_FUNCTION(hipMemcpyAsync);
SD_ORT_HIP_FUNCTION(hipMemcpyPeerAsync);
SD_ORT_HIP_FUNCTION(hipMemsetAsync);
SD_ORT_HIP_FUNCTION(hipRuntimeGetVersion);
SD_ORT_HIP_FUNCTION(hipSetDevice);
SD_ORT_HIP_FUNCTION(hipStreamBeginCapture);
SD_ORT_HIP_FUNCTION(hipStreamCreateWithFlags);
SD_ORT_HIP_FUNCTION(hipStreamDestroy);
SD_ORT_HIP_FUNCTION(hipStreamEndCapture);
SD_ORT_HIP_FUNCTION(hipStreamIsCapturing);
SD_ORT_HIP_FUNCTION(hipStreamSynchronize);
SD_ORT_HIP_FUNCTION(hipStreamWaitEvent);

}  // namespace sd_ort
