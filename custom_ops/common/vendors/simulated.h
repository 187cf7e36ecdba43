// The host in the place of a GPU, under the names that common/gpu.h gives HIP and CUDA: device memory is host memory, a
// launch runs at once or, on a stream that captures, is recorded, and a graph is what was recorded. As on a GPU, a
// stream that captures runs nothing and cannot be waited for.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/cpu.h"

#define SD_ORT_GPU_NAME(name) host##name
#define SD_ORT_DEVICE inline

namespace sd_ort {

enum hostError_t {
  hostSuccess = 0,
  hostErrorInvalidValue = 1,
  hostErrorMemoryAllocation = 2,
  hostErrorDeviceLost = 719,
  hostErrorStreamCaptureUnsupported = 900,
  hostErrorStreamCaptureInvalidated = 901,
};

inline const char* hostGetErrorString(hostError_t error) {
  switch (error) {
    case hostSuccess:
      return "no error";
    case hostErrorMemoryAllocation:
      return "out of memory";
    case hostErrorDeviceLost:
      return "the device is gone";
    case hostErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case hostErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default:
      return "invalid argument";
  }
}

// For tests: from when SD_ORT_SIMULATED_LOST is set, the device fails as a GPU does that was reset, or fell off its
// bus.
inline hostError_t if_there(hostError_t error = hostSuccess) {
  return std::getenv("SD_ORT_SIMULATED_LOST") == nullptr ? error : hostErrorDeviceLost;
}
inline hostError_t hostGetLastError() { return if_there(); }

struct HostGraph {
  std::vector<std::function<void()>> launches;
};
using hostGraph_t = HostGraph*;
using hostGraphExec_t = HostGraph*;

// For tests: if SD_ORT_SIMULATED_CAPTURES names a folder, the first launch that is captured creates the file "captures"
// in it and waits for the file "go".
inline void wait_in_capture() {
  const char* const value = std::getenv("SD_ORT_SIMULATED_CAPTURES");
  if (value == nullptr) return;
  const std::string folder = value;
  if (std::ifstream(folder + "/captures")) return;
  std::ofstream(folder + "/captures");
  while (!std::ifstream(folder + "/go")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

struct HostStream {
  HostGraph* capturing = nullptr;
  bool invalidated = false;  // its capture
  // For sizes whose memory is to be measured and whose arithmetic would take minutes.
  const bool idle = std::getenv("SD_ORT_SIMULATED_IDLE") != nullptr;

  // Runs `work` now, or records it, or, idle, drops it.
  void launch(std::function<void()> work) {
    if (idle) return;
    if (capturing != nullptr) wait_in_capture();
    capturing == nullptr ? work() : capturing->launches.push_back(std::move(work));
  }
};
using hostStream_t = HostStream*;

// The streams that capture. As with HIP, a wait for the device, and a copy without a stream, fails while there is one,
// in any thread, and invalidates them all.
struct HostCaptures {
  std::mutex mutex;
  std::set<HostStream*> streams;

  static HostCaptures& all() {
    static HostCaptures* const captures = new HostCaptures;
    return *captures;
  }
  hostError_t invalidate() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (HostStream* stream : streams) stream->invalidated = true;
    return streams.empty() ? hostSuccess : hostErrorStreamCaptureUnsupported;
  }
};

struct HostEvent {
  std::chrono::steady_clock::time_point when;
};
using hostEvent_t = HostEvent*;

enum hostMemcpyKind { hostMemcpyHostToDevice, hostMemcpyDeviceToHost, hostMemcpyDeviceToDevice, hostMemcpyDefault };
enum hostStreamCaptureMode { hostStreamCaptureModeRelaxed };
enum hostStreamCaptureStatus { hostStreamCaptureStatusNone, hostStreamCaptureStatusActive };
constexpr unsigned hostStreamNonBlocking = 1, hostEventDisableTiming = 2;

// The one device: its memory is what malloc gives.
struct hostDeviceProp {
  const char* name = "host";
  size_t totalGlobalMem = size_t{16} << 30;
};
inline hostError_t hostGetDeviceCount(int* count) { return *count = 1, hostSuccess; }
inline hostError_t hostGetDevice(int* device) { return *device = 0, hostSuccess; }
inline hostError_t hostSetDevice(int device) { return if_there(device == 0 ? hostSuccess : hostErrorInvalidValue); }
inline hostError_t hostGetDeviceProperties(hostDeviceProp* properties, int) { return *properties = {}, hostSuccess; }
inline hostError_t hostDriverGetVersion(int* version) { return *version = 0, hostSuccess; }
inline hostError_t hostRuntimeGetVersion(int* version) { return *version = 0, hostSuccess; }
inline hostError_t hostDeviceSynchronize() { return if_there(HostCaptures::all().invalidate()); }

inline hostError_t hostMalloc(void** data, size_t bytes) {
  *data =
      bytes > hostDeviceProp().totalGlobalMem ? nullptr : ::operator new(bytes, std::align_val_t{256}, std::nothrow);
  return *data == nullptr ? hostErrorMemoryAllocation : hostSuccess;
}
inline hostError_t hostFree(void* data) { return ::operator delete(data, std::align_val_t{256}), hostSuccess; }
inline hostError_t hostMemGetInfo(size_t* available, size_t* total) {
  *available = *total = hostDeviceProp().totalGlobalMem;
  return hostSuccess;
}

inline hostError_t hostMemcpy(void* to, const void* from, size_t bytes, hostMemcpyKind) {
  const hostError_t error = HostCaptures::all().invalidate();
  if (error == hostSuccess) std::memcpy(to, from, bytes);
  return error;
}
inline hostError_t hostMemcpyAsync(void* to, const void* from, size_t bytes, hostMemcpyKind, hostStream_t stream) {
  const hostError_t error = if_there();
  if (error == hostSuccess) stream->launch([=] { std::memcpy(to, from, bytes); });
  return error;
}
inline hostError_t hostMemsetAsync(void* to, int value, size_t bytes, hostStream_t stream) {
  stream->launch([=] { std::memset(to, value, bytes); });
  return hostSuccess;
}

inline hostError_t hostStreamCreateWithFlags(hostStream_t* stream, unsigned) {
  return *stream = new HostStream, hostSuccess;
}
inline hostError_t hostStreamDestroy(hostStream_t stream) { return delete stream, hostSuccess; }
inline hostError_t hostStreamSynchronize(hostStream_t stream) {
  if (stream->capturing == nullptr) return if_there();
  stream->invalidated = true;
  return if_there(hostErrorStreamCaptureUnsupported);
}
inline hostError_t hostStreamWaitEvent(hostStream_t, hostEvent_t, unsigned) { return hostSuccess; }

inline hostError_t hostEventCreateWithFlags(hostEvent_t* event, unsigned) {
  return *event = new HostEvent{}, hostSuccess;
}
inline hostError_t hostEventCreate(hostEvent_t* event) { return hostEventCreateWithFlags(event, 0); }
inline hostError_t hostEventDestroy(hostEvent_t event) { return delete event, hostSuccess; }
inline hostError_t hostEventRecord(hostEvent_t event, hostStream_t stream) {
  const auto record = [=] { event->when = std::chrono::steady_clock::now(); };
  stream == nullptr ? record() : stream->launch(record);  // null: the default stream
  return hostSuccess;
}
inline hostError_t hostEventSynchronize(hostEvent_t) { return hostSuccess; }
inline hostError_t hostEventElapsedTime(float* milliseconds, hostEvent_t begin, hostEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
  return hostSuccess;
}

inline hostError_t hostStreamBeginCapture(hostStream_t stream, hostStreamCaptureMode) {
  if (stream->capturing != nullptr) return hostErrorStreamCaptureUnsupported;
  HostCaptures& all = HostCaptures::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.streams.insert(stream);
  return stream->capturing = new HostGraph, hostSuccess;
}
inline hostError_t hostStreamEndCapture(hostStream_t stream, hostGraph_t* graph) {
  if (stream->capturing == nullptr) return hostErrorInvalidValue;
  HostCaptures& all = HostCaptures::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.streams.erase(stream);
  *graph = std::exchange(stream->capturing, nullptr);
  if (!std::exchange(stream->invalidated, false)) return hostSuccess;
  delete std::exchange(*graph, nullptr);
  return hostErrorStreamCaptureInvalidated;
}
inline hostError_t hostStreamIsCapturing(hostStream_t stream, hostStreamCaptureStatus* status) {
  *status = stream->capturing == nullptr ? hostStreamCaptureStatusNone : hostStreamCaptureStatusActive;
  return hostSuccess;
}
inline hostError_t hostGraphInstantiateWithFlags(hostGraphExec_t* made, hostGraph_t graph, unsigned long long) {
  return *made = new HostGraph(*graph), hostSuccess;
}
inline hostError_t hostGraphDestroy(hostGraph_t graph) { return delete graph, hostSuccess; }
inline hostError_t hostGraphExecDestroy(hostGraphExec_t graph) { return delete graph, hostSuccess; }
inline hostError_t hostGraphLaunch(hostGraphExec_t graph, hostStream_t stream) {
  for (const auto& launch : graph->launches) stream->launch(launch);
  return hostSuccess;
}

// The provider for this vendor: its name, a PCI id that no GPU has, the vendor's name.
constexpr const char* gpuProviderName = "SdOrtSimulated";
constexpr uint32_t gpuVendorId = 0x1D05;
constexpr const char* gpuVendorName = "sd-ort";

inline hostError_t gpuMallocPinned(void** data, size_t bytes) { return hostMalloc(data, bytes); }
inline hostError_t gpuFreePinned(void* data) { return hostFree(data); }

using gpuDeviceProp_t = hostDeviceProp;
inline std::string arch_name(const gpuDeviceProp_t& properties) { return properties.name; }

using half_t = SD_ORT_ISA::Half;
using bf16_t = SD_ORT_ISA::BFloat;
using SD_ORT_ISA::to_float;
template <class T>
T from_float(float x) {
  return SD_ORT_ISA::from_float<T>(x);
}

}  // namespace sd_ort
