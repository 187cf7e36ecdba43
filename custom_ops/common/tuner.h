// Chooses a candidate for a call: by an earlier measurement, by one made now, or the default.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "common/tunable.h"

namespace sd_ort {

// The number of the current device; 0 when there is none.
int current_device();

// The current device's architecture as its compiler names it: "gfx942", "sm_90"; empty when there is no device.
std::string gpu_arch();

// What the results depend on beside it: "driver 13000 runtime 13000", as the vendor counts versions.
std::string gpu_versions();

// As replace_memsets of common/gpu_graph.h, of a graph that somebody else captured.
void replace_memsets_of(void* graph);

class Tuner {
 public:
  static Tuner& instance();

  void enable(bool enabled);
  // From now on what is timed has its memsets replaced, as our provider's graphs have and other callers' have not.
  void time_without_memsets();
  void clear();
  void set(const std::string& op, const std::string& signature, int candidate);

  // The candidate for a call, -1 when none supports it. Tunes first when enabled and the signature is new.
  // `x`: where the input lies that the first output may be written over; null for none.
  int choose(const GpuOp& op, const void* params, void* stream, const void* x = nullptr);

  // Runs every supported candidate on the call's own buffers, the default first, replayed as graphs where they can be
  // captured, on a stream of its own once `stream` has done its work; the fastest whose output agrees with
  // that of candidate 0 is kept. Returns a message when candidate 0 fails.
  std::string tune(const GpuOp& op, const void* params, void* stream, const void* x = nullptr);

  // A line per result: operator, signature, candidate, microseconds, the default's microseconds.
  std::string results() const;

 private:
  struct Result {
    int candidate = -1;
    double microseconds = 0;
    double default_microseconds = 0;
    std::string line;
  };
  using Key = std::pair<std::string, std::string>;

  mutable std::mutex mutex_;
  bool enabled_ = false;
  std::map<Key, Result> results_;
};

}  // namespace sd_ort
