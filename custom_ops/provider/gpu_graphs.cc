#include "provider/gpu_graphs.h"

#include <stdexcept>
#include <string>

namespace sd_ort {

Graphs::~Graphs() {
  for (const auto& entry : captured_) device::destroy_graph(entry.second);
}

bool Graphs::is_captured(int number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return captured_.count(number) != 0;
}

void Graphs::begin_run(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (captures_ || device::is_capturing(stream_)) {  // an earlier run failed in the middle of its capture
    captures_ = false;
    try {
      device::destroy_graph(device::end_capture(stream_));
    } catch (const std::runtime_error&) {  // an invalidated capture has no graph
    }
  }
  if (number == kUncaptured || captured_.count(number) != 0 || runs_[number]++ == 0) return;
  device::wait(stream_);
  device::begin_capture(stream_);
  captures_ = true;
}

void Graphs::end_run(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!captures_) return;
  captures_ = false;
  captured_[number] = device::end_capture(stream_);
  device::launch(captured_[number], stream_);
}

void Graphs::replay(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = captured_.find(number);
  if (found == captured_.end()) throw std::runtime_error("no run was captured as graph " + std::to_string(number));
  device::launch(found->second, stream_);
}

void Graphs::release(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = captured_.find(number);
  if (found == captured_.end()) return;
  device::wait(stream_);
  device::destroy_graph(found->second);
  captured_.erase(found);
  runs_.erase(number);
}

}  // namespace sd_ort
