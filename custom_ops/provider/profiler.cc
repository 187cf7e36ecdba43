#include "provider/profiler.h"

#include <chrono>
#include <cmath>
#include <cstdio>

namespace sd_ort {
namespace {

// Start events of the nodes that this thread has begun and not ended; null if the stream was capturing.
thread_local std::vector<device::Event> open_events;

constexpr const char* kSuffix = "_kernel_time";  // suffix of ONNX Runtime's event of a node

}  // namespace

Profiler::Profiler(device::Stream stream, int device) : OrtEpProfilerImpl{}, stream_(stream), device_(device) {
  ort_version_supported = ORT_API_VERSION;
  Release = [](OrtEpProfilerImpl* self) noexcept { delete static_cast<Profiler*>(self); };
  StartProfiling = [](OrtEpProfilerImpl* self, int64_t offset) noexcept {
    return guarded([&] { of(self).start(offset); });
  };
  StartEvent = [](OrtEpProfilerImpl* self, uint64_t) noexcept { return guarded([&] { of(self).begin(); }); };
  StopEvent = [](OrtEpProfilerImpl* self, uint64_t, const OrtProfilingEvent* event) noexcept {
    return guarded([&] { of(self).end(event); });
  };
  EndProfiling = [](OrtEpProfilerImpl* self, OrtProfilingEventsContainer* container) noexcept {
    return guarded([&] { of(self).collect(container); });
  };
}

Profiler::~Profiler() {
  for (device::Event event : events_) device::destroy_event(event);
}

device::Event Profiler::record_event() {
  device::Event event = device::create_event(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(event);
  device::record(event, stream_);
  return event;
}

void Profiler::start(int64_t offset) {
  const auto called = std::chrono::steady_clock::now();
  device::use(device_);
  open_events.clear();
  origin_ = record_event();
  const auto passed = std::chrono::steady_clock::now() - called;
  offset_ = offset + std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

void Profiler::begin() {
  open_events.push_back(nullptr);
  device::use(device_);
  if (!device::is_capturing(stream_)) open_events.back() = record_event();
}

void Profiler::end(const OrtProfilingEvent* event) {
  if (open_events.empty()) return;  // the node began before profiling
  const device::Event first = open_events.back();
  open_events.pop_back();
  const char* provider = nullptr;
  check(ep_api->ProfilingEvent_GetArgValue(event, "provider", &provider));
  if (first == nullptr || provider == nullptr || std::string(provider) != device::kProvider) return;
  if (device::is_capturing(stream_)) return;
  const char* text = nullptr;
  int64_t host_start = 0;
  check(ep_api->ProfilingEvent_GetName(event, &text));
  check(ep_api->ProfilingEvent_GetTimestampUs(event, &host_start));
  std::string name = text;
  if (const size_t end = name.rfind(kSuffix); end != std::string::npos) name.resize(end);
  const device::Event last = record_event();
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_.push_back({name, host_start, first, last});
}

void Profiler::collect(OrtProfilingEventsContainer* container) {
  device::use(device_);
  device::wait(stream_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Node& node : nodes_) {
    const double start = 1e3 * device::milliseconds(origin_, node.first) + 1e-3 * static_cast<double>(offset_);
    const double duration = 1e3 * device::milliseconds(node.first, node.last);
    char microseconds[32];
    std::snprintf(microseconds, sizeof(microseconds), "%.3f", duration);
    const std::string host_start = std::to_string(node.host_start);
    const char* const keys[] = {"device_us", "node_ts", "provider"};
    const char* const values[] = {microseconds, host_start.c_str(), device::kProvider};
    OrtHandle<OrtProfilingEvent> event(ep_api->ReleaseProfilingEvent);
    check(ep_api->CreateProfilingEvent(OrtProfilingEventCategory_KERNEL, -1, -1, node.name.c_str(), std::llround(start),
                                       std::llround(duration), keys, values, 3, event.out()));
    const OrtProfilingEvent* const created = event.get();
    check(ep_api->ProfilingEventsContainer_AddEvents(container, &created, 1));
  }
  nodes_.clear();
}

}  // namespace sd_ort
