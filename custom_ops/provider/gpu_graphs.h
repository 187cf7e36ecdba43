// Captured runs by number: a run is recorded once and replayed from then on, over the same addresses.
#pragma once

#include <map>
#include <mutex>

#include "provider/device.h"

namespace sd_ort {

class Graphs {
 public:
  static constexpr int kUncaptured = -1;  // the number of runs that are never captured

  explicit Graphs(device::Stream stream) : stream_(stream) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  bool is_captured(int number) const;

  // Called around every run: the first of a number runs as it is, so that memory is reserved and kernels are chosen;
  // the second is captured, and replayed at its end, since capturing runs nothing.
  void begin_run(int number);
  void end_run(int number);

  void replay(int number);
  void release(int number);

 private:
  mutable std::mutex mutex_;
  device::Stream stream_;
  std::map<int, device::Graph> captured_;
  std::map<int, int> runs_;
  bool captures_ = false;
};

}  // namespace sd_ort
