// OrtAllocators: device memory from a pool, and pinned host memory.
#pragma once

#include <memory>

#include "provider/ort.h"
#include "provider/pool.h"

namespace sd_ort {

// Allocates device memory from a shared pool.
class DeviceAllocator : public OrtAllocator {
 public:
  DeviceAllocator(const OrtMemoryInfo* memory, std::shared_ptr<Pool> pool);

 private:
  const OrtMemoryInfo* memory_;  // owned by the factory
  std::shared_ptr<Pool> pool_;
};

// Allocates page-locked host memory, which the device copies from and to directly.
class PinnedAllocator : public OrtAllocator {
 public:
  explicit PinnedAllocator(const OrtMemoryInfo* memory);

 private:
  const OrtMemoryInfo* memory_;
};

}  // namespace sd_ort
