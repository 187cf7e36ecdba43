// A stream and events for the package's Python (sd_ort/runtime/stream.py), which then needs no vendor library of its
// own: named and called as cudaStreamCreate and its like. Handles are device.h's; 0, or 1 for a failure.
#include "common/platform.h"
#include "provider/device.h"

namespace device = sd_ort::device;
using sd_ort::status_of;

SD_ORT_EXPORT int sd_ort_SetDevice(int number) {
  return status_of([&] { device::use(number); });
}
SD_ORT_EXPORT int sd_ort_MemGetInfo(size_t* free, size_t* total) {
  return status_of([&] {
    const device::Memory memory = device::memory();
    *free = memory.free;
    *total = memory.total;
  });
}
SD_ORT_EXPORT int sd_ort_StreamCreate(void** stream) {
  return status_of([&] { *stream = device::create_stream(); });
}
SD_ORT_EXPORT int sd_ort_EventCreate(void** event) {
  return status_of([&] { *event = device::create_event(true); });
}
SD_ORT_EXPORT int sd_ort_EventRecord(void* event, void* stream) {
  return status_of([&] { device::record(event, stream); });
}
SD_ORT_EXPORT int sd_ort_EventSynchronize(void* event) {
  return status_of([&] { device::wait_on_host(event); });
}
SD_ORT_EXPORT int sd_ort_EventElapsedTime(float* milliseconds, void* first, void* last) {
  return status_of([&] { *milliseconds = device::milliseconds(first, last); });
}
