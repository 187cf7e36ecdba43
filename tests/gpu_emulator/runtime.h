// The runtime calls of the tuner, on host memory: EMULATED(name) is the vendor's name of a function.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

using EMULATED(Error_t) = int;
constexpr int EMULATED(Success) = 0;
constexpr int EMULATED(MemcpyHostToDevice) = 1;
constexpr int EMULATED(MemcpyDeviceToHost) = 2;
constexpr int EMULATED(MemcpyDeviceToDevice) = 3;
using EMULATED(Stream_t) = void*;
struct EmulatedEvent {
  std::chrono::steady_clock::time_point time;
};
using EMULATED(Event_t) = EmulatedEvent*;

inline int EMULATED(GetLastError)() { return 0; }
inline const char* EMULATED(GetErrorString)(int) { return ""; }
inline int EMULATED(Malloc)(void** to, size_t bytes) { return (*to = std::malloc(bytes)) == nullptr; }
inline int EMULATED(Free)(void* data) { return std::free(data), 0; }
inline int EMULATED(Memcpy)(void* to, const void* from, size_t bytes, int) { return std::memcpy(to, from, bytes), 0; }
inline int EMULATED(MemcpyAsync)(void* to, const void* from, size_t bytes, int, void*) {
  return std::memcpy(to, from, bytes), 0;
}
inline int EMULATED(MemsetAsync)(void* to, int value, size_t bytes, void*) { return std::memset(to, value, bytes), 0; }
inline int EMULATED(StreamSynchronize)(void*) { return 0; }
inline int EMULATED(GetDevice)(int* device) { return *device = 0; }
inline int EMULATED(DriverGetVersion)(int* version) { return *version = 0; }
inline int EMULATED(RuntimeGetVersion)(int* version) { return *version = 0; }
inline int EMULATED(EventCreate)(EmulatedEvent** event) { return *event = new EmulatedEvent, 0; }
inline int EMULATED(EventDestroy)(EmulatedEvent* event) { return delete event, 0; }
inline int EMULATED(EventSynchronize)(EmulatedEvent*) { return 0; }
inline int EMULATED(EventRecord)(EmulatedEvent* event, void*) {
  return event->time = std::chrono::steady_clock::now(), 0;
}
inline int EMULATED(EventElapsedTime)(float* milliseconds, EmulatedEvent* begin, EmulatedEvent* end) {
  return *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count(), 0;
}

inline int EMULATED(StreamCreateWithFlags)(void** stream, unsigned) { return *stream = nullptr, 0; }
inline int EMULATED(StreamDestroy)(void*) { return 0; }

// No graphs: the tuner times launches one by one.
using EMULATED(Graph_t) = void*;
using EMULATED(GraphExec_t) = void*;
constexpr unsigned EMULATED(StreamNonBlocking) = 1;
constexpr int EMULATED(StreamCaptureModeRelaxed) = 2;
inline int EMULATED(StreamBeginCapture)(void*, int) { return 801; }
inline int EMULATED(StreamEndCapture)(void*, void**) { return 801; }
inline int EMULATED(GraphInstantiateWithFlags)(void**, void*, unsigned long long) { return 801; }
inline int EMULATED(GraphLaunch)(void*, void*) { return 801; }
inline int EMULATED(GraphDestroy)(void*) { return 0; }
inline int EMULATED(GraphExecDestroy)(void*) { return 0; }

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
