// A stream and events for the package's Python (sd_ort/runtime/stream.py), which then needs no vendor library of its
// own: named and called as cudaStreamCreate and its like. Handles are device.h's; 0, or 1 for a failure.
#include <stdexcept>

#include "common/platform.h"
#include "provider/device.h"

namespace {

template <class Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // namespace

namespace device = sd_ort::device;

SD_ORT_EXPORT int sd_ort_SetDevice(int number) {
  return guarded([&] { device::use(number); });
}
SD_ORT_EXPORT int sd_ort_StreamCreate(void** stream) {
  return guarded([&] { *stream = device::create_stream(); });
}
SD_ORT_EXPORT int sd_ort_EventCreate(void** event) {
  return guarded([&] { *event = device::create_event(true); });
}
SD_ORT_EXPORT int sd_ort_EventRecord(void* event, void* stream) {
  return guarded([&] { device::record(event, stream); });
}
SD_ORT_EXPORT int sd_ort_EventSynchronize(void* event) {
  return guarded([&] { device::wait_on_host(event); });
}
SD_ORT_EXPORT int sd_ort_EventElapsedTime(float* milliseconds, void* first, void* last) {
  return guarded([&] { *milliseconds = device::milliseconds(first, last); });
}
