#include "provider/upload.h"

#include <cstring>

namespace sd_ort {

void Upload::copy(int device, void* to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  device::use(device);
  Job job(device, to, bytes, [from](char* piece, size_t begin, size_t count) {
    std::memcpy(piece, static_cast<const char*>(from) + begin, count);
  });
  Lanes& lanes = lanes_[device];
  open_lanes(lanes, job);
  if (lanes.empty()) return device::copy_now(to, from, bytes, device::Copy::kToDevice);
  device::wait_for_all();
  send(lanes, job);
}

}  // namespace sd_ort
