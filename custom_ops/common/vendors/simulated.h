// Simulated device for tests, with the function names that common/gpu.h expects of HIP and CUDA. Device memory is host
// memory. A launch runs at once; on a capturing stream it is recorded, and a graph is a list of recorded launches. As
// on a GPU, a capturing stream runs nothing and cannot be synchronized.
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

#define SD_ORT_GPU_NAME(name) simulated##name
#define SD_ORT_DEVICE inline

namespace sd_ort {

struct alignas(16) FourRegisters {
  uint32_t parts[4];
};

enum simulatedError_t {
  simulatedSuccess = 0,
  simulatedErrorInvalidValue = 1,
  simulatedErrorMemoryAllocation = 2,
  simulatedErrorDeviceLost = 719,
  simulatedErrorStreamCaptureUnsupported = 900,
  simulatedErrorStreamCaptureInvalidated = 901,
};

inline const char* simulatedGetErrorString(simulatedError_t error) {
  switch (error) {
    case simulatedSuccess:
      return "no error";
    case simulatedErrorMemoryAllocation:
      return "out of memory";
    case simulatedErrorDeviceLost:
      return "the device is gone";
    case simulatedErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case simulatedErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default:
      return "invalid argument";
  }
}

// If SD_ORT_SIMULATED_LOST is set, the device fails like a GPU that was reset or removed.
inline simulatedError_t unless_lost(simulatedError_t error = simulatedSuccess) {
  return std::getenv("SD_ORT_SIMULATED_LOST") == nullptr ? error : simulatedErrorDeviceLost;
}
inline simulatedError_t simulatedGetLastError() { return unless_lost(); }

struct SimulatedGraph {
  std::vector<std::function<void()>> launches;
};
using simulatedGraph_t = SimulatedGraph*;
using simulatedGraphExec_t = SimulatedGraph*;

// If SD_ORT_SIMULATED_CAPTURES names a folder, the first captured launch creates the file "captures" there and waits
// for the file "go".
inline void wait_in_capture() {
  const char* const value = std::getenv("SD_ORT_SIMULATED_CAPTURES");
  if (value == nullptr) return;
  const std::string folder = value;
  if (std::ifstream(folder + "/captures")) return;
  std::ofstream(folder + "/captures");
  while (!std::ifstream(folder + "/go")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

struct SimulatedStream {
  SimulatedGraph* capturing = nullptr;
  bool invalidated = false;  // the capture is invalid
  // SD_ORT_SIMULATED_IDLE: launches do nothing, for measurements of memory and host time.
  const bool idle = std::getenv("SD_ORT_SIMULATED_IDLE") != nullptr;

  // Runs `work`, or records it while capturing, or drops it if idle.
  void launch(std::function<void()> work) {
    if (idle) return;
    if (capturing != nullptr) wait_in_capture();
    capturing == nullptr ? work() : capturing->launches.push_back(std::move(work));
  }
};
using simulatedStream_t = SimulatedStream*;

// Capturing streams. As with HIP, a device synchronization or a copy without a stream fails in any thread while a
// stream captures, and invalidates all captures.
struct SimulatedCaptures {
  std::mutex mutex;
  std::set<SimulatedStream*> streams;

  static SimulatedCaptures& all() {
    static SimulatedCaptures* const captures = new SimulatedCaptures;
    return *captures;
  }
  simulatedError_t invalidate() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (SimulatedStream* stream : streams) stream->invalidated = true;
    return streams.empty() ? simulatedSuccess : simulatedErrorStreamCaptureUnsupported;
  }
};

struct SimulatedEvent {
  std::chrono::steady_clock::time_point when;
};
using simulatedEvent_t = SimulatedEvent*;

enum simulatedMemcpyKind {
  simulatedMemcpyHostToDevice,
  simulatedMemcpyDeviceToHost,
  simulatedMemcpyDeviceToDevice,
  simulatedMemcpyDefault
};
enum simulatedStreamCaptureMode { simulatedStreamCaptureModeRelaxed };
enum simulatedStreamCaptureStatus { simulatedStreamCaptureStatusNone, simulatedStreamCaptureStatusActive };
constexpr unsigned simulatedStreamNonBlocking = 1, simulatedEventDisableTiming = 2;

// Devices: one, or SD_ORT_SIMULATED_DEVICES. All share the host's memory.
struct simulatedDeviceProp {
  const char* name = "simulated";
  size_t totalGlobalMem = size_t{16} << 30;
};
inline int simulated_devices() {
  const char* const count = std::getenv("SD_ORT_SIMULATED_DEVICES");
  return count == nullptr ? 1 : std::atoi(count);
}
inline int& simulated_device() {
  static thread_local int device = 0;
  return device;
}
inline simulatedError_t simulatedGetDeviceCount(int* count) { return *count = simulated_devices(), simulatedSuccess; }
inline simulatedError_t simulatedGetDevice(int* device) { return *device = simulated_device(), simulatedSuccess; }
inline simulatedError_t simulatedSetDevice(int device) {
  if (device < 0 || device >= simulated_devices()) return simulatedErrorInvalidValue;
  simulated_device() = device;
  return unless_lost();
}
inline simulatedError_t simulatedDeviceCanAccessPeer(int* can, int, int) { return *can = 1, simulatedSuccess; }
inline simulatedError_t simulatedDeviceEnablePeerAccess(int, unsigned) { return simulatedSuccess; }
inline simulatedError_t simulatedGetDeviceProperties(simulatedDeviceProp* properties, int) {
  return *properties = {}, simulatedSuccess;
}
inline simulatedError_t simulatedDriverGetVersion(int* version) { return *version = 0, simulatedSuccess; }
inline simulatedError_t simulatedRuntimeGetVersion(int* version) { return *version = 0, simulatedSuccess; }
inline simulatedError_t simulatedDeviceSynchronize() { return unless_lost(SimulatedCaptures::all().invalidate()); }

inline simulatedError_t simulatedMalloc(void** data, size_t bytes) {
  *data = bytes > simulatedDeviceProp().totalGlobalMem ? nullptr
                                                       : ::operator new(bytes, std::align_val_t{256}, std::nothrow);
  return *data == nullptr ? simulatedErrorMemoryAllocation : simulatedSuccess;
}
inline simulatedError_t simulatedFree(void* data) {
  return ::operator delete(data, std::align_val_t{256}), simulatedSuccess;
}
inline simulatedError_t simulatedMemGetInfo(size_t* available, size_t* total) {
  *available = *total = simulatedDeviceProp().totalGlobalMem;
  return simulatedSuccess;
}

inline simulatedError_t simulatedMemcpy(void* to, const void* from, size_t bytes, simulatedMemcpyKind) {
  const simulatedError_t error = SimulatedCaptures::all().invalidate();
  if (error == simulatedSuccess) std::memcpy(to, from, bytes);
  return error;
}
inline simulatedError_t simulatedMemcpyAsync(void* to, const void* from, size_t bytes, simulatedMemcpyKind,
                                             simulatedStream_t stream) {
  const simulatedError_t error = unless_lost();
  if (error == simulatedSuccess) stream->launch([=] { std::memcpy(to, from, bytes); });
  return error;
}
inline simulatedError_t simulatedMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                                 simulatedStream_t stream) {
  return simulatedMemcpyAsync(to, from, bytes, simulatedMemcpyDeviceToDevice, stream);
}
inline simulatedError_t simulatedMemsetAsync(void* to, int value, size_t bytes, simulatedStream_t stream) {
  stream->launch([=] { std::memset(to, value, bytes); });
  return simulatedSuccess;
}

inline simulatedError_t simulatedStreamCreateWithFlags(simulatedStream_t* stream, unsigned) {
  return *stream = new SimulatedStream, simulatedSuccess;
}
inline simulatedError_t simulatedStreamDestroy(simulatedStream_t stream) { return delete stream, simulatedSuccess; }
inline simulatedError_t simulatedStreamSynchronize(simulatedStream_t stream) {
  if (stream->capturing == nullptr) return unless_lost();
  stream->invalidated = true;
  return unless_lost(simulatedErrorStreamCaptureUnsupported);
}
inline simulatedError_t simulatedStreamWaitEvent(simulatedStream_t, simulatedEvent_t, unsigned) {
  return simulatedSuccess;
}

inline simulatedError_t simulatedEventCreateWithFlags(simulatedEvent_t* event, unsigned) {
  return *event = new SimulatedEvent{}, simulatedSuccess;
}
inline simulatedError_t simulatedEventCreate(simulatedEvent_t* event) {
  return simulatedEventCreateWithFlags(event, 0);
}
inline simulatedError_t simulatedEventDestroy(simulatedEvent_t event) { return delete event, simulatedSuccess; }
inline simulatedError_t simulatedEventRecord(simulatedEvent_t event, simulatedStream_t stream) {
  const auto record = [=] { event->when = std::chrono::steady_clock::now(); };
  stream == nullptr ? record() : stream->launch(record);  // null is the default stream
  return simulatedSuccess;
}
inline simulatedError_t simulatedEventSynchronize(simulatedEvent_t) { return simulatedSuccess; }
inline simulatedError_t simulatedEventElapsedTime(float* milliseconds, simulatedEvent_t begin, simulatedEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
  return simulatedSuccess;
}

inline simulatedError_t simulatedStreamBeginCapture(simulatedStream_t stream, simulatedStreamCaptureMode) {
  if (stream->capturing != nullptr) return simulatedErrorStreamCaptureUnsupported;
  SimulatedCaptures& all = SimulatedCaptures::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.streams.insert(stream);
  return stream->capturing = new SimulatedGraph, simulatedSuccess;
}
inline simulatedError_t simulatedStreamEndCapture(simulatedStream_t stream, simulatedGraph_t* graph) {
  if (stream->capturing == nullptr) return simulatedErrorInvalidValue;
  SimulatedCaptures& all = SimulatedCaptures::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.streams.erase(stream);
  *graph = std::exchange(stream->capturing, nullptr);
  if (!std::exchange(stream->invalidated, false)) return simulatedSuccess;
  delete std::exchange(*graph, nullptr);
  return simulatedErrorStreamCaptureInvalidated;
}
inline simulatedError_t simulatedStreamIsCapturing(simulatedStream_t stream, simulatedStreamCaptureStatus* status) {
  *status = stream->capturing == nullptr ? simulatedStreamCaptureStatusNone : simulatedStreamCaptureStatusActive;
  return simulatedSuccess;
}
inline simulatedError_t simulatedGraphInstantiateWithFlags(simulatedGraphExec_t* executable, simulatedGraph_t graph,
                                                           unsigned long long) {
  return *executable = new SimulatedGraph(*graph), simulatedSuccess;
}
inline simulatedError_t simulatedGraphDestroy(simulatedGraph_t graph) { return delete graph, simulatedSuccess; }
inline simulatedError_t simulatedGraphExecDestroy(simulatedGraphExec_t graph) { return delete graph, simulatedSuccess; }
inline simulatedError_t simulatedGraphLaunch(simulatedGraphExec_t graph, simulatedStream_t stream) {
  for (const auto& launch : graph->launches) stream->launch(launch);
  return simulatedSuccess;
}

// Provider name, PCI vendor id (none of a GPU) and vendor name.
constexpr const char* gpuProviderName = "SdOrtSimulated";
constexpr uint32_t gpuVendorId = 0x1D05;
constexpr const char* gpuVendorName = "sd-ort";

inline simulatedError_t gpuMallocPinned(void** data, size_t bytes) { return simulatedMalloc(data, bytes); }
inline simulatedError_t gpuFreePinned(void* data) { return simulatedFree(data); }

using gpuDeviceProp_t = simulatedDeviceProp;
inline std::string arch_name(const gpuDeviceProp_t& properties) { return properties.name; }

using half_t = SD_ORT_ISA::Half;
using bf16_t = SD_ORT_ISA::BFloat;
using SD_ORT_ISA::to_float;
template <class T>
T from_float(float x) {
  return SD_ORT_ISA::from_float<T>(x);
}

}  // namespace sd_ort
