// C functions for streams and events, used by sd_ort/runtime/stream.py instead of a vendor library. Named after
// cudaStreamCreate etc.; handles are those of device.h. Each returns 0, or 1 on failure.
#include "common/platform.h"
#include "provider/device.h"

namespace device = sd_ort::device;
using sd_ort::status_of;

SD_ORT_EXPORT int sd_ort_GetDeviceCount(int* count) {
  return status_of([&] { *count = device::count(); });
}
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
// Memory functions return 1 if there is too little memory.
SD_ORT_EXPORT int sd_ort_Malloc(void** data, size_t bytes) { return (*data = device::allocate(bytes)) == nullptr; }
SD_ORT_EXPORT int sd_ort_Free(void* data) {
  device::release(data);
  return 0;
}
SD_ORT_EXPORT int sd_ort_MallocHost(void** data, size_t bytes) {
  return (*data = device::allocate_pinned(bytes)) == nullptr;
}
SD_ORT_EXPORT int sd_ort_FreeHost(void* data) {
  device::release_pinned(data);
  return 0;
}
SD_ORT_EXPORT int sd_ort_MemcpyToDeviceAsync(void* to, const void* from, size_t bytes, void* stream) {
  return status_of([&] { device::copy(to, from, bytes, device::Copy::kToDevice, stream); });
}
SD_ORT_EXPORT int sd_ort_StreamCreate(void** stream) {
  return status_of([&] { *stream = device::create_stream(); });
}
SD_ORT_EXPORT int sd_ort_StreamSynchronize(void* stream) {
  return status_of([&] { device::wait(stream); });
}
SD_ORT_EXPORT int sd_ort_StreamWaitEvent(void* stream, void* event, unsigned) {
  return status_of([&] { device::wait_in_stream(stream, event); });
}
SD_ORT_EXPORT int sd_ort_DeviceCanAccessPeer(int* can, int number, int peer) {
  return status_of([&] { *can = device::can_access(number, peer); });
}
SD_ORT_EXPORT int sd_ort_DeviceEnablePeerAccess(int peer, unsigned) {
  device::enable_access(peer);
  return 0;
}
SD_ORT_EXPORT int sd_ort_GetLastError() { return 0; }  // every function here clears the error of its own failure
SD_ORT_EXPORT int sd_ort_MemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                         void* stream) {
  return status_of([&] { device::copy_to_peer(to, to_device, from, from_device, bytes, stream); });
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
