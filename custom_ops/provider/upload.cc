#include "provider/upload.h"

#include <cstring>

namespace sd_ort {

void Upload::copy(int device, void* to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  device::use(device);
  CopyJob job(device, to, bytes, [from](char* buffer, size_t begin, size_t count) {
    std::memcpy(buffer, static_cast<const char*>(from) + begin, count);
  });
  StagedCopiers& copiers = copiers_[device];
  add_copiers(copiers, job);
  if (copiers.empty()) return device::copy_now(to, from, bytes, device::Copy::kToDevice);
  device::wait_for_all();
  copy_staged(copiers, job);
}

}  // namespace sd_ort
