// What the simulated ROCm libraries share: work in a stream's order, checks of addresses, and messages.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>

#include "../simulated_hip.h"
#include "host_math.h"

#define SIMULATED_EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated {

// Ends the process: the real library would read or write where it must not, or compute something else.
[[noreturn]] inline void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] inline void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("simulated ROCm: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputs("\n", stderr);
  va_end(arguments);
  std::abort();
}

// Runs `work` in the order of `stream`, in each launch if the stream captures. Nothing if kernels do nothing.
inline hipError_t submit(hipStream_t stream, std::function<void()> work) {
  if (!simulated_hip_kernels_run()) work = [] {};
  using Work = std::function<void()>;
  return simulated_hip_submit(
      stream, [](void* argument) { (*static_cast<Work*>(argument))(); }, new Work(std::move(work)),
      [](void* argument) { delete static_cast<Work*>(argument); });
}

// Ends the process if the `bytes` at `address` are not in one allocation of the device, or `address` is not a multiple
// of `alignment`.
inline void check_memory(const char* function, const char* name, const void* address, size_t bytes, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    fail("%s: %s at %p is not aligned to %zu bytes", function, name, address, alignment);
  }
  if (bytes > 0 && !simulated_hip_is_allocated(address, bytes)) {
    fail("%s: %s has %zu bytes at %p, which are not in one allocation of the device", function, name, bytes, address);
  }
}

}  // namespace simulated

// A function of the real library that is not simulated: a call ends the process with its name.
#define NOT_SIMULATED(name)                                \
  SIMULATED_EXPORT void simulated_##name() __asm__(#name); \
  void simulated_##name() { simulated::fail("%s is not simulated", #name); }
