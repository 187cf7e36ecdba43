// Tensors from ordinary host memory to the device: threads copy pieces into pinned memory while earlier pieces are on
// their way. The driver does the same with one thread, whose copies then are what a session's loading waits for.
#pragma once

#include <map>
#include <mutex>

#include "provider/staged_copy.h"

namespace sd_ort {

class Upload {
 public:
  static constexpr size_t kLeast = 1 << 16;  // fewer bytes are left to the driver

  // To memory of a device, after all that is queued there. Returns when the bytes have arrived.
  void copy(int device, void* to, const void* from, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<int, Lanes> lanes_;  // by device; they stay, with their threads and their memory
};

}  // namespace sd_ort
