#include "provider/options.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>

namespace sd_ort {
namespace {

unsigned long long number(const std::string& name, const std::string& value, unsigned long long largest) {
  errno = 0;
  char* end = nullptr;
  const unsigned long long parsed = std::strtoull(value.c_str(), &end, 0);
  const bool digits = !value.empty() && std::isdigit(static_cast<unsigned char>(value[0])) && *end == '\0';
  require(digits && errno == 0 && parsed <= largest,
          "option " + name + " must be a number of 0 to " + std::to_string(largest) + ", not '" + value + "'");
  return parsed;
}

void read(Options& options, const std::string& name, const std::string& value) {
  if (name == "device_id") {
    options.device_id = static_cast<int>(number(name, value, 1023));
  } else if (name == "user_compute_stream") {
    options.has_user_stream = true;
    options.user_compute_stream = reinterpret_cast<void*>(number(name, value, UINTPTR_MAX));
  } else if (name == "tuning") {
    options.tuning = number(name, value, 1) != 0;
  } else if (name == "graph") {
    options.graph = number(name, value, 1) != 0;
  } else if (name == "memory_limit") {
    options.memory_limit = number(name, value, SIZE_MAX);
  } else if (name == "weights") {
    options.weights = reinterpret_cast<void*>(number(name, value, UINTPTR_MAX));
  } else {
    require(false, "there is no option '" + name +
                       "': device_id, user_compute_stream, tuning, graph and memory_limit are the provider's");
  }
}

}  // namespace

Options read_options(const OrtSessionOptions* session, const std::string& provider) {
  std::string prefix = "ep." + provider + ".";
  std::transform(prefix.begin(), prefix.end(), prefix.begin(), [](unsigned char c) { return std::tolower(c); });
  Owned<OrtKeyValuePairs> pairs(ort_api->ReleaseKeyValuePairs);
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
  return options;
}

}  // namespace sd_ort
