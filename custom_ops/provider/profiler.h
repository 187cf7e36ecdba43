// Adds the device time of every node to ONNX Runtime's profile (session option `enable_profiling`).
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "provider/device.h"
#include "provider/ort.h"

namespace sd_ort {

// Profiler of one session or one run. ONNX Runtime calls it at the begin and end of each node, and it records an event
// in the stream. When profiling ends, the time between both becomes a profile event of category Kernel with the node's
// name. Captured and replayed runs have no such events. Functions may be called by several threads.
class Profiler : public OrtEpProfilerImpl {
 public:
  Profiler(device::Stream stream, int device);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

 private:
  struct Node {
    std::string name;
    int64_t host_start;  // start of ONNX Runtime's event in microseconds, which identifies the run of the node
    device::Event first, last;
  };

  static Profiler& of(OrtEpProfilerImpl* self) { return *static_cast<Profiler*>(self); }
  void start(int64_t offset);
  void begin();
  void end(const OrtProfilingEvent* event);
  void collect(OrtProfilingEventsContainer* container);
  device::Event record_event();

  const device::Stream stream_;
  const int device_;
  std::mutex mutex_;
  int64_t offset_ = 0;                 // nanoseconds between ONNX Runtime's start and origin_
  device::Event origin_ = nullptr;     // start of this profiler
  std::vector<device::Event> events_;  // all events, destroyed at the end
  std::vector<Node> nodes_;
};

}  // namespace sd_ort
