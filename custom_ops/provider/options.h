// The options of a session, as `provider_options` of Python give them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "provider/ort.h"

namespace sd_ort {

struct Options {
  int device_id = 0;
  bool has_user_stream = false;
  void* user_compute_stream = nullptr;  // a hipStream_t or cudaStream_t, its address as a number
  bool tuning = false;                  // measure the candidates of every new call
  bool graph = false;                   // capture runs and replay them
  size_t memory_limit = SIZE_MAX;       // bytes of device memory
  void* weights = nullptr;              // of sd_ort_WeightsRead, its address as a number: what the session was given
};

// Reads the entries `ep.<provider>.<option>` of the session's configuration. Throws std::invalid_argument for an option
// that there is not, or a value that it cannot have.
Options read_options(const OrtSessionOptions* session, const std::string& provider);

}  // namespace sd_ort
