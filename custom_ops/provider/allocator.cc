#include "provider/allocator.h"

#include "provider/device.h"

namespace sd_ort {

DeviceAllocator::DeviceAllocator(const OrtMemoryInfo* memory, std::shared_ptr<Pool> pool)
    : OrtAllocator{}, memory_(memory), pool_(std::move(pool)) {
  version = ORT_API_VERSION;
  Alloc = [](OrtAllocator* self, size_t bytes) noexcept {
    return static_cast<DeviceAllocator*>(self)->pool_->allocate(bytes);
  };
  Reserve = Alloc;
  AllocOnStream = [](OrtAllocator* self, size_t bytes, OrtSyncStream*) noexcept { return self->Alloc(self, bytes); };
  Free = [](OrtAllocator* self, void* data) noexcept { static_cast<DeviceAllocator*>(self)->pool_->release(data); };
  Info = [](const OrtAllocator* self) noexcept { return static_cast<const DeviceAllocator*>(self)->memory_; };
  Shrink = [](OrtAllocator* self) noexcept -> OrtStatus* {
    static_cast<DeviceAllocator*>(self)->pool_->release_unused();
    return nullptr;
  };
  GetStats = [](const OrtAllocator* self, OrtKeyValuePairs** out) noexcept {
    return guarded([&] {
      const Pool::Statistics found = static_cast<const DeviceAllocator*>(self)->pool_->statistics();
      OrtKeyValuePairs* pairs = nullptr;
      ort_api->CreateKeyValuePairs(&pairs);
      const std::string limit = found.limit == SIZE_MAX ? "-1" : std::to_string(found.limit);
      ort_api->AddKeyValuePair(pairs, "Limit", limit.c_str());
      ort_api->AddKeyValuePair(pairs, "InUse", std::to_string(found.in_use).c_str());
      ort_api->AddKeyValuePair(pairs, "MaxInUse", std::to_string(found.peak_in_use).c_str());
      ort_api->AddKeyValuePair(pairs, "TotalAllocated", std::to_string(found.reserved).c_str());
      *out = pairs;
    });
  };
}

PinnedAllocator::PinnedAllocator(const OrtMemoryInfo* memory) : OrtAllocator{}, memory_(memory) {
  version = ORT_API_VERSION;
  Alloc = [](OrtAllocator*, size_t bytes) noexcept { return bytes == 0 ? nullptr : device::allocate_pinned(bytes); };
  Reserve = Alloc;
  Free = [](OrtAllocator*, void* data) noexcept {
    if (data != nullptr) device::release_pinned(data);
  };
  Info = [](const OrtAllocator* self) noexcept { return static_cast<const PinnedAllocator*>(self)->memory_; };
}

}  // namespace sd_ort
