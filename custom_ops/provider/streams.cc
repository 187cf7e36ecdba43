// C functions for streams and events, used by sd_ort/runtime/stream.py instead of a vendor library. Named after
// cudaStreamCreate etc.; handles are those of device.h. Each returns 0, or 1 on failure.
#include "common/platform.h"
#include "provider/device.h"

namespace device = sd_ort::device;
using sd_ort::status_of;

SD_ORT_EXPORT int sd_ort_SetDevice(int number) {
  return status_of([&] { device::use(number); });
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
