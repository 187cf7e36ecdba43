#include "settings.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace simulated {
namespace {

struct Target {
  const char* name;
  Isa isa;
  const char* features;
  unsigned compute_units;  // RDNA: work group processors
  const char* generic;
  unsigned lds_kib;
};

constexpr Target kTargets[] = {
    {"gfx90a", Isa::kCdna, ":sramecc+:xnack-", 104, "", 64},
    {"gfx942", Isa::kCdna, ":sramecc+:xnack-", 304, "gfx9-4-generic", 64},
    {"gfx950", Isa::kCdna, ":sramecc+:xnack-", 256, "gfx9-4-generic", 160},
    {"gfx1030", Isa::kRdna2, "", 40, "gfx10-3-generic", 64},
    {"gfx1031", Isa::kRdna2, "", 20, "gfx10-3-generic", 64},
    {"gfx1032", Isa::kRdna2, "", 16, "gfx10-3-generic", 64},
    {"gfx1033", Isa::kRdna2, "", 4, "gfx10-3-generic", 64},
    {"gfx1034", Isa::kRdna2, "", 8, "gfx10-3-generic", 64},
    {"gfx1035", Isa::kRdna2, "", 6, "gfx10-3-generic", 64},
    {"gfx1036", Isa::kRdna2, "", 1, "gfx10-3-generic", 64},
    {"gfx1100", Isa::kRdna3, "", 48, "gfx11-generic", 64},
    {"gfx1101", Isa::kRdna3, "", 30, "gfx11-generic", 64},
    {"gfx1102", Isa::kRdna3, "", 16, "gfx11-generic", 64},
    {"gfx1103", Isa::kRdna3, "", 6, "gfx11-generic", 64},
    {"gfx1150", Isa::kRdna3, "", 8, "gfx11-generic", 64},
    {"gfx1151", Isa::kRdna3, "", 20, "gfx11-generic", 64},
    {"gfx1152", Isa::kRdna3, "", 4, "gfx11-generic", 64},
    {"gfx1153", Isa::kRdna3, "", 2, "gfx11-generic", 64},
    {"gfx1200", Isa::kRdna4, "", 16, "gfx12-generic", 64},
    {"gfx1201", Isa::kRdna4, "", 32, "gfx12-generic", 64},
};

const Target* find_target(const std::string& name) {
  for (const Target& target : kTargets)
    if (name == target.name) return &target;
  return nullptr;
}

std::string variable(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

// A whole number, with suffix G, M or K for powers of 1024.
size_t number(const char* name, const char* fallback) {
  const std::string text = variable(name, fallback);
  char* end = nullptr;
  const size_t value = strtoull(text.c_str(), &end, 10);
  const std::string suffix = end;
  const int shift = suffix == "G" ? 30 : suffix == "M" ? 20 : suffix == "K" ? 10 : 0;
  if (end == text.c_str() || (shift == 0 && !suffix.empty()))
    fail("%s must be a number such as 8G, got %s.", name, text.c_str());
  return value << shift;
}

Settings read_settings() {
  Settings settings;
  settings.target = variable("SIMULATED_HIP_TARGET", "gfx1100");
  const Target* target = find_target(settings.target);
  if (target == nullptr) {
    std::string names;
    for (const Target& one : kTargets) names += std::string(" ") + one.name;
    fail("SIMULATED_HIP_TARGET must be one of%s, got %s.", names.c_str(), settings.target.c_str());
  }
  settings.isa = target->isa;
  settings.features = target->features;
  settings.wave_size = target->isa == Isa::kCdna ? 64 : 32;
  settings.compute_units = target->compute_units;
  settings.lds_bytes = target->lds_kib << 10;
  settings.devices = static_cast<int>(number("SIMULATED_HIP_DEVICES", "1"));
  settings.memory = number("SIMULATED_HIP_MEMORY", "8G");
  const std::string kernels = variable("SIMULATED_HIP_KERNELS", "run");
  if (kernels != "run" && kernels != "skip")
    fail("SIMULATED_HIP_KERNELS must be run or skip, got %s.", kernels.c_str());
  settings.kernels_run = kernels == "run";
  if (settings.kernels_run && settings.isa == Isa::kRdna2)
    fail("The emulator has no instructions of %s: SIMULATED_HIP_KERNELS must be skip.", settings.target.c_str());
  settings.guard_pages = number("SIMULATED_HIP_GUARD", "1") != 0;
  const std::string threads = std::to_string(std::thread::hardware_concurrency());
  settings.threads = static_cast<unsigned>(number("SIMULATED_HIP_THREADS", threads.c_str()));
  settings.cache = variable("SIMULATED_HIP_CACHE", "");
  settings.instruction_compiler = variable("SIMULATED_HIP_COMPILER", "");
  settings.report = variable("SIMULATED_HIP_REPORT", "");
  return settings;
}

void print(const char* format, va_list arguments) {
  char text[4096];
  vsnprintf(text, sizeof text, format, arguments);
  fprintf(stderr, "simulated HIP: %s\n", text);
  fflush(stderr);
}

}  // namespace

const Settings& settings() {
  static const auto* instance = new Settings(read_settings());  // never destroyed: the report needs it at exit
  return *instance;
}

std::string generic_target(const std::string& target) {
  const Target* known = find_target(target);
  return known == nullptr ? "" : known->generic;
}

void print_message(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print(format, arguments);
  va_end(arguments);
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print(format, arguments);
  va_end(arguments);
  abort();
}

}  // namespace simulated
