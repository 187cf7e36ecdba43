// Execution of a kernel's machine code on the host.
#pragma once

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include <atomic>
#include <mutex>

#include "code_object.h"
#include "instruction_table.h"

namespace simulated {

struct LaunchDimensions {
  dim3 grid;  // in blocks
  dim3 block;
  uint32_t dynamic_lds_bytes = 0;
};

struct KernelUse {
  uint64_t launches = 0, waves = 0, wave_instructions = 0;
  double seconds = 0;
};

class Kernel {
 public:
  // `description` must outlive the kernel.
  explicit Kernel(const KernelDescription& description) : description_(description) {}

  const KernelDescription& description() const { return description_; }

  // The check of a launch, with the errors of clr 6.4.3.
  hipError_t check(const LaunchDimensions& dimensions) const;

  // The kernarg segment of a launch: explicit arguments by address, and the hidden ones.
  std::vector<uint8_t> pack(const LaunchDimensions& dimensions, void* const* arguments) const;
  // As pack, from a buffer with the explicit arguments.
  std::vector<uint8_t> pack(const LaunchDimensions& dimensions, const void* buffer, size_t bytes) const;

  // Runs all blocks. Ends the process with a message if an instruction cannot run.
  void run(const LaunchDimensions& dimensions, const std::vector<uint8_t>& kernarg);

  KernelUse use() const;

 private:
  void pack_hidden(const LaunchDimensions& dimensions, std::vector<uint8_t>* kernarg) const;

  const KernelDescription& description_;
  std::shared_ptr<const InstructionTable> table_;
  std::once_flag table_loaded_;
  mutable std::mutex mutex_;
  KernelUse use_;
};

}  // namespace simulated
