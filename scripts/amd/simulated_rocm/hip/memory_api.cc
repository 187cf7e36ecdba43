// Exported functions of memory and copies.
#include <cstring>

#include "call.h"
#include "memory.h"
#include "stream.h"

namespace simulated {
namespace {

hipError_t allocate_checked(MemoryKind kind, void** address, size_t bytes) {
  const hipError_t status = check_unsafe_call();
  return status != hipSuccess ? status : allocate(kind, current_device, bytes, address);
}

hipError_t release_checked(MemoryKind kind, void* address) {
  const hipError_t status = check_unsafe_call();
  return status != hipSuccess ? status : release(kind, address);
}

hipError_t copy(const char* function, void* destination, const void* source, size_t bytes, hipMemcpyKind kind) {
  hipError_t status = check_implicit_wait();
  if (status == hipSuccess) status = check_copy(function, destination, source, bytes, kind);
  if (status != hipSuccess) return status;
  return submit(nullptr, [=] { memmove(destination, source, bytes); });
}

hipError_t copy_in_stream(const char* function, void* destination, const void* source, size_t bytes, hipMemcpyKind kind,
                          hipStream_t stream) {
  const hipError_t status = check_copy(function, destination, source, bytes, kind);
  if (status != hipSuccess) return status;
  NodeParams params;
  params.type = hipGraphNodeTypeMemcpy;
  if (kind == hipMemcpyHostToDevice) params.source = source;
  params.bytes = bytes;
  return submit(stream, [=] { memmove(destination, source, bytes); }, params);
}

size_t extent(size_t pitch, size_t width, size_t height) { return height == 0 ? 0 : pitch * (height - 1) + width; }

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

hipError_t hipMalloc(void** address, size_t bytes) {
  return call(__func__, [&] { return allocate_checked(MemoryKind::kDevice, address, bytes); });
}

hipError_t hipFree(void* address) {
  return call(__func__, [&] { return release_checked(MemoryKind::kDevice, address); });
}

hipError_t hipHostMalloc(void** address, size_t bytes, unsigned) {
  return call(__func__, [&] { return allocate_checked(MemoryKind::kPinned, address, bytes); });
}

hipError_t hipHostFree(void* address) {
  return call(__func__, [&] { return release_checked(MemoryKind::kPinned, address); });
}

hipError_t hipHostGetDevicePointer(void** device_address, void* address, unsigned flags) {
  return call(__func__, [&] {
    if (device_address == nullptr || flags != 0 || !is_allocated(address, 1)) return hipErrorInvalidValue;
    *device_address = address;
    return hipSuccess;
  });
}

hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* address) {
  return call(__func__, [&] {
    const std::optional<Allocation> allocation = find_allocation(address);
    if (attributes == nullptr || !allocation) return hipErrorInvalidValue;
    memset(attributes, 0, sizeof *attributes);
    const bool on_device = allocation->kind == MemoryKind::kDevice;
    attributes->type = on_device ? hipMemoryTypeDevice : hipMemoryTypeHost;
    attributes->device = allocation->device;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = on_device ? nullptr : const_cast<void*>(address);
    return hipSuccess;
  });
}

hipError_t hipMemcpy(void* destination, const void* source, size_t bytes, hipMemcpyKind kind) {
  return call(__func__, [&] { return copy("hipMemcpy", destination, source, bytes, kind); });
}

hipError_t hipMemcpyAsync(void* destination, const void* source, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
  return call(__func__, [&] { return copy_in_stream("hipMemcpyAsync", destination, source, bytes, kind, stream); });
}

hipError_t hipMemcpyWithStream(void* destination, const void* source, size_t bytes, hipMemcpyKind kind,
                               hipStream_t stream) {
  return call(__func__,
              [&] { return copy_in_stream("hipMemcpyWithStream", destination, source, bytes, kind, stream); });
}

hipError_t hipMemcpyPeer(void* destination, int, const void* source, int, size_t bytes) {
  return call(__func__, [&] { return copy("hipMemcpyPeer", destination, source, bytes, hipMemcpyDeviceToDevice); });
}

hipError_t hipMemcpyPeerAsync(void* destination, int, const void* source, int, size_t bytes, hipStream_t stream) {
  return call(__func__, [&] {
    return copy_in_stream("hipMemcpyPeerAsync", destination, source, bytes, hipMemcpyDeviceToDevice, stream);
  });
}

hipError_t hipMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source, size_t source_pitch,
                            size_t width, size_t height, hipMemcpyKind kind, hipStream_t stream) {
  return call(__func__, [&] {
    if (width > destination_pitch || width > source_pitch) return hipErrorInvalidPitchValue;
    // Both sides by their whole extent: the smaller pitch first, so that one check has the bytes of each side.
    hipError_t status = check_copy("hipMemcpy2DAsync", destination, source, width, kind);
    const size_t to = extent(destination_pitch, width, height), from = extent(source_pitch, width, height);
    if (status == hipSuccess && find_allocation(destination)) status = check_range("hipMemcpy2DAsync", destination, to);
    if (status == hipSuccess && find_allocation(source)) status = check_range("hipMemcpy2DAsync", source, from);
    if (status != hipSuccess) return status;
    return submit(stream, [=] {
      for (size_t row = 0; row < height; ++row)
        memmove(static_cast<char*>(destination) + row * destination_pitch,
                static_cast<const char*>(source) + row * source_pitch, width);
    });
  });
}

hipError_t hipMemset(void* destination, int value, size_t bytes) {
  return call(__func__, [&] {
    hipError_t status = check_implicit_wait();
    if (status == hipSuccess) status = check_range("hipMemset", destination, bytes);
    return status != hipSuccess ? status : submit(nullptr, [=] { memset(destination, value, bytes); });
  });
}

hipError_t hipMemsetAsync(void* destination, int value, size_t bytes, hipStream_t stream) {
  return call(__func__, [&] {
    const hipError_t status = check_range("hipMemsetAsync", destination, bytes);
    return status != hipSuccess ? status : submit(stream, [=] { memset(destination, value, bytes); });
  });
}

}  // extern "C"
