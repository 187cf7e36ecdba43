// Settings of the simulated HIP runtime, from environment variables that scripts/amd/simulate sets.
#pragma once

#include <cstddef>
#include <string>

namespace simulated {

// Instruction sets, as the emulator names them. It has none of RDNA2: there kernels can only be skipped.
enum class Isa { kCdna, kRdna2, kRdna3, kRdna4 };

struct Settings {
  Isa isa = Isa::kRdna3;
  std::string target;    // SIMULATED_HIP_TARGET: "gfx942"
  std::string features;  // of the target: ":sramecc+:xnack-"
  unsigned wave_size = 32;
  unsigned compute_units = 0;        // as hipDeviceProp_t.multiProcessorCount counts them
  unsigned lds_bytes = 65536;        // of a block
  int devices = 1;                   // SIMULATED_HIP_DEVICES
  size_t memory = size_t{8} << 30;   // SIMULATED_HIP_MEMORY: bytes of each device
  bool kernels_run = true;           // SIMULATED_HIP_KERNELS: run or skip
  bool guard_pages = true;           // SIMULATED_HIP_GUARD: a page without access after each allocation, 1 or 0
  unsigned threads = 1;              // SIMULATED_HIP_THREADS: host threads of one kernel
  std::string cache;                 // SIMULATED_HIP_CACHE: folder of compiled instructions
  std::string instruction_compiler;  // SIMULATED_HIP_COMPILER: command, without options for isa and folder
  std::string report;                // SIMULATED_HIP_REPORT: file of the report at exit, empty for none
};

// Settings of this process. Prints a message and ends the process if a variable has no valid value.
const Settings& settings();

// The generic target whose code objects also run on `target`, for example "gfx11-generic", or "" if there is none.
std::string generic_target(const std::string& target);

// Prints "simulated HIP: " and a message to standard error.
void print_message(const char* format, ...) __attribute__((format(printf, 1, 2)));
// As print_message, then ends the process as a memory fault of a GPU does.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace simulated
