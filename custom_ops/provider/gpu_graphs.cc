#include "provider/gpu_graphs.h"

#include <stdexcept>
#include <string>

namespace sd_ort {

GpuGraphCache::~GpuGraphCache() {
  for (const auto& entry : captured_) device::destroy_graph(entry.second);
}

bool GpuGraphCache::is_captured(int graph_id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return captured_.count(graph_id) != 0;
}

void GpuGraphCache::begin_run(int graph_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capturing_ || device::is_capturing(stream_)) {  // an earlier run failed during its capture
    capturing_ = false;
    try {
      device::destroy_graph(device::end_capture(stream_));
    } catch (const std::runtime_error&) {  // an invalidated capture has no graph
    }
  }
  if (graph_id == kUncaptured || captured_.count(graph_id) != 0 || runs_[graph_id]++ == 0) return;
  device::wait(stream_);
  device::begin_capture(stream_);
  capturing_ = true;
}

void GpuGraphCache::end_run(int graph_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!capturing_) return;
  capturing_ = false;
  captured_[graph_id] = device::end_capture(stream_);
  device::launch(captured_[graph_id], stream_);
}

void GpuGraphCache::replay(int graph_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = captured_.find(graph_id);
  if (found == captured_.end()) throw std::runtime_error("no run was captured as graph " + std::to_string(graph_id));
  device::launch(found->second, stream_);
}

void GpuGraphCache::release(int graph_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = captured_.find(graph_id);
  if (found == captured_.end()) return;
  device::wait(stream_);
  device::destroy_graph(found->second);
  captured_.erase(found);
  runs_.erase(graph_id);
}

}  // namespace sd_ort
