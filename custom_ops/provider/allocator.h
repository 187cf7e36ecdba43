// OrtAllocators: device memory from a pool, and pinned host memory.
#pragma once

#include <memory>

#include "provider/ort.h"
#include "provider/pool.h"

namespace sd_ort {

// Device memory of one pool, which it shares with whoever else holds it.
class DeviceAllocator : public OrtAllocator {
 public:
  DeviceAllocator(const OrtMemoryInfo* memory, std::shared_ptr<Pool> pool);

 private:
  const OrtMemoryInfo* memory_;  // the factory's
  std::shared_ptr<Pool> pool_;
};

// Host memory that the device copies from and to without a detour.
class PinnedAllocator : public OrtAllocator {
 public:
  explicit PinnedAllocator(const OrtMemoryInfo* memory);

 private:
  const OrtMemoryInfo* memory_;
};

}  // namespace sd_ort
