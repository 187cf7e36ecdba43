// Provider options of a session (`provider_options` in Python).
#pragma once

#include <cstddef>
#include <cstdint>

#include "provider/ort.h"

namespace sd_ort {

struct Options {
  int device_id = 0;
  bool has_user_stream = false;
  void* user_compute_stream = nullptr;  // a hipStream_t or cudaStream_t; the option holds its address
  bool tuning = false;                  // measure the candidates of calls without a tuning result
  bool graph = false;                   // capture runs as GPU graphs
  size_t memory_limit = SIZE_MAX;       // bytes of device memory
  bool shared_pool = false;             // one pool for all such sessions on a user stream, not captured
  void* weights = nullptr;              // PrefetchedWeights from sd_ort_WeightsRead; the option holds the address
};

// Reads the session configuration entries `ep.<provider>.<option>`. Throws std::invalid_argument for an unknown option
// or an invalid value.
Options read_options(const OrtSessionOptions* session, const std::string& provider);

}  // namespace sd_ort
