// The device's time of every node in ONNX Runtime's own profile (session option `enable_profiling`).
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "provider/device.h"
#include "provider/ort.h"

namespace sd_ort {

// Of one session or one run. ONNX Runtime tells it when a node begins and ends: an event goes into the stream at both,
// and when profiling ends, the time between them is an event of category Kernel under the node's name. A node whose run
// is captured or replayed has none. Functions may be called by several threads.
class Profiler : public OrtEpProfilerImpl {
 public:
  Profiler(device::Stream stream, int device);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

 private:
  struct Node {
    std::string name;
    int64_t host_start;  // microseconds of ONNX Runtime's own event, which tells runs of a node apart
    device::Event first, last;
  };

  static Profiler& of(OrtEpProfilerImpl* self) { return *static_cast<Profiler*>(self); }
  void start(int64_t offset);
  void begin();
  void end(const OrtProfilingEvent* event);
  void collect(OrtProfilingEventsContainer* container);
  device::Event recorded();

  const device::Stream stream_;
  const int device_;
  std::mutex mutex_;
  int64_t offset_ = 0;                 // nanoseconds from ONNX Runtime's start to ours
  device::Event origin_ = nullptr;     // when we started
  std::vector<device::Event> events_;  // all, to be destroyed
  std::vector<Node> nodes_;
};

}  // namespace sd_ort
