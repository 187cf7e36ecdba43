#include "provider/options.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>

namespace sd_ort {
namespace {

unsigned long long parse_number(const std::string& name, const std::string& value, unsigned long long largest) {
  errno = 0;
  char* end = nullptr;
  const unsigned long long parsed = std::strtoull(value.c_str(), &end, 0);
  const bool digits = !value.empty() && std::isdigit(static_cast<unsigned char>(value[0])) && *end == '\0';
  require(digits && errno == 0 && parsed <= largest,
          "option " + name + " must be a number from 0 to " + std::to_string(largest) + ", got '" + value + "'");
  return parsed;
}

void read(Options& options, const std::string& name, const std::string& value) {
  if (name == "device_id") {
    options.device_id = static_cast<int>(parse_number(name, value, 1023));
  } else if (name == "user_compute_stream") {
    options.has_user_stream = true;
    options.user_compute_stream = reinterpret_cast<void*>(parse_number(name, value, UINTPTR_MAX));
  } else if (name == "tuning") {
    options.tuning = parse_number(name, value, 1) != 0;
  } else if (name == "graph") {
    options.graph = parse_number(name, value, 1) != 0;
  } else if (name == "memory_limit") {
    options.memory_limit = parse_number(name, value, SIZE_MAX);
  } else if (name == "shared_pool") {
    options.shared_pool = parse_number(name, value, 1) != 0;
  } else if (name == "weights") {
    options.weights = reinterpret_cast<void*>(parse_number(name, value, UINTPTR_MAX));
  } else {
    require(false, "unknown option '" + name +
                       "': choose from device_id, user_compute_stream, tuning, graph and memory_limit");
  }
}

}  // namespace

Options read_options(const OrtSessionOptions* session, const std::string& provider) {
  std::string prefix = "ep." + provider + ".";
  std::transform(prefix.begin(), prefix.end(), prefix.begin(), [](unsigned char c) { return std::tolower(c); });
  OrtHandle<OrtKeyValuePairs> pairs(ort_api->ReleaseKeyValuePairs);
  check(ort_api->GetSessionOptionsConfigEntries(session, pairs.out()));
  const char* const* keys = nullptr;
  const char* const* values = nullptr;
  size_t count = 0;
  ort_api->GetKeyValuePairs(pairs.get(), &keys, &values, &count);
  Options options;
  for (size_t i = 0; i < count; ++i) {
    const std::string key = keys[i];
    if (key.compare(0, prefix.size(), prefix) == 0) read(options, key.substr(prefix.size()), values[i]);
  }
  require(!options.shared_pool || (options.has_user_stream && !options.graph),
          "option shared_pool needs user_compute_stream, and no graph");
  return options;
}

}  // namespace sd_ort
