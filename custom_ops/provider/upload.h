// Copies pageable host memory to a device with several threads and pinned staging buffers. The driver uses one thread,
// which then limits the loading of a session.
#pragma once

#include <map>
#include <mutex>

#include "provider/staged_copy.h"

namespace sd_ort {

class Upload {
 public:
  static constexpr size_t kMinBytes = 1 << 16;  // smaller copies go through the driver

  // Copies after all work queued on the device, and returns when the data has arrived.
  void copy(int device, void* to, const void* from, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<int, StagedCopiers> copiers_;  // by device; they keep their threads and pinned memory
};

}  // namespace sd_ort
