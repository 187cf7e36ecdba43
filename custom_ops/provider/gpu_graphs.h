// Captured GPU graphs by id: a run is captured once and then replayed with the same addresses.
#pragma once

#include <map>
#include <mutex>

#include "provider/device.h"

namespace sd_ort {

class GpuGraphCache {
 public:
  static constexpr int kUncaptured = -1;  // graph id of runs that are never captured

  explicit GpuGraphCache(device::Stream stream) : stream_(stream) {}
  ~GpuGraphCache();
  GpuGraphCache(const GpuGraphCache&) = delete;
  GpuGraphCache& operator=(const GpuGraphCache&) = delete;

  bool is_captured(int graph_id) const;

  // Called around every run. The first run of an id executes normally, which reserves memory and chooses kernels. The
  // second is captured and launched at its end, since a capture executes nothing.
  void begin_run(int graph_id);
  void end_run(int graph_id);

  void replay(int graph_id);
  void release(int graph_id);

 private:
  mutable std::mutex mutex_;
  device::Stream stream_;
  std::map<int, device::Graph> captured_;
  std::map<int, int> runs_;
  bool capturing_ = false;
};

}  // namespace sd_ort
