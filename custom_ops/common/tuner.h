// Chooses the candidate for a call: a tuning result, a new measurement, or the default.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "common/tunable.h"

namespace sd_ort {

// Returns the current device id; 0 without a device.
int current_device();

// Returns the address of a number in the memory of the current device, for libraries that read scales there; null if
// it cannot be written. Written once and never freed.
const float* device_number(float value);

// Returns the architecture of the current device, such as "gfx942" or "sm_90"; empty without a device.
std::string gpu_arch();

// Returns the driver and runtime versions: "driver 13000 runtime 13000".
std::string gpu_versions();

// Returns why the vendor's runtime cannot be loaded and what to install; null if it is loaded or linked.
const char* missing_runtime();

// Returns the path of the runtime that is loaded at its first use; empty if it is missing or linked.
std::string runtime_path();

// Calls replace_memsets (common/gpu_graph.h) on a captured graph of another library.
void replace_memsets_of(void* graph);

class Tuner {
 public:
  static Tuner& instance();

  void enable(bool enabled);
  // From now on measures graphs with replaced memsets, like those of the sd-ort provider.
  void time_with_replaced_memsets();
  void clear();
  void set(const std::string& op, const std::string& signature, int candidate);

  // Returns the candidate for a call, -1 if none supports it. Tunes first if tuning is enabled and the signature is
  // new. `x`: address of the input that output 0 may alias, or null.
  int choose(const GpuOp& op, const void* params, void* stream, const void* x = nullptr);

  // Measures every supported candidate on the buffers of the call, the default first, and stores the fastest whose
  // outputs match those of candidate 0. Waits for `stream` and uses a stream of its own, with graph replay where
  // capture works. Returns an error message if candidate 0 fails.
  std::string tune(const GpuOp& op, const void* params, void* stream, const void* x = nullptr);

  // Returns a line per result: operator, signature, candidate, microseconds, microseconds of the default, and the
  // faster candidates that failed or gave wrong results.
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
