#include "provider/stream.h"

#include <memory>

namespace sd_ort {
namespace {

// An event in a stream that other streams or the host wait for.
class Notification : public OrtSyncNotificationImpl {
 public:
  explicit Notification(device::Stream stream) : OrtSyncNotificationImpl{}, stream_(stream) {
    ort_version_supported = ORT_API_VERSION;
    event_ = device::create_event();
    Release = [](OrtSyncNotificationImpl* self) noexcept { delete static_cast<Notification*>(self); };
    Activate = [](OrtSyncNotificationImpl* self) noexcept {
      return guarded([&] { device::record(of(self).event_, of(self).stream_); });
    };
    WaitOnDevice = [](OrtSyncNotificationImpl* self, OrtSyncStream* consumer) noexcept {
      return guarded([&] { device::wait_in_stream(ort_api->SyncStream_GetHandle(consumer), of(self).event_); });
    };
    WaitOnHost = [](OrtSyncNotificationImpl* self) noexcept {
      return guarded([&] { device::wait_on_host(of(self).event_); });
    };
  }
  ~Notification() { device::destroy_event(event_); }

 private:
  static Notification& of(OrtSyncNotificationImpl* self) { return *static_cast<Notification*>(self); }

  device::Stream stream_;
  device::Event event_;
};

bool is_pinned(const OrtMemoryDevice* memory) {
  return ep_api->MemoryDevice_GetMemoryType(memory) == OrtDeviceMemoryType_HOST_ACCESSIBLE;
}

bool is_host(const OrtMemoryDevice* memory) {
  return ep_api->MemoryDevice_GetDeviceType(memory) == OrtMemoryInfoDeviceType_CPU || is_pinned(memory);
}

bool is_device(const OrtMemoryDevice* memory) {
  return ep_api->MemoryDevice_GetDeviceType(memory) == OrtMemoryInfoDeviceType_GPU &&
         ep_api->MemoryDevice_GetVendorId(memory) == device::kVendorId;
}

void copy_tensor(const OrtValue* from, OrtValue* to, OrtSyncStream* stream, Upload& upload) {
  const bool from_host = is_host(ep_api->Value_GetMemoryDevice(from));
  const bool to_host = is_host(ep_api->Value_GetMemoryDevice(to));
  const void* source = nullptr;
  void* target = nullptr;
  size_t bytes = 0;
  check(ort_api->GetTensorData(from, &source));
  check(ort_api->GetTensorMutableData(to, &target));
  check(ort_api->GetTensorSizeInBytes(from, &bytes));
  require(target != nullptr || bytes == 0, "out of device memory for a copy");
  const auto direction = to_host     ? device::Copy::kToHost
                         : from_host ? device::Copy::kToDevice
                                     : device::Copy::kOnDevice;
  if (from_host && to_host) {
    std::memcpy(target, source, bytes);
  } else if (stream != nullptr) {
    device::copy(target, source, bytes, direction, ort_api->SyncStream_GetHandle(stream));
  } else {
    const OrtMemoryDevice* memory = ep_api->Value_GetMemoryDevice(to_host ? from : to);
    const int device = static_cast<int>(ep_api->MemoryDevice_GetDeviceId(memory));
    if (from_host && !is_pinned(ep_api->Value_GetMemoryDevice(from)) && bytes >= Upload::kMinBytes) {
      upload.copy(device, target, source, bytes);
    } else {
      device::use(device);
      device::copy_now(target, source, bytes, direction);
    }
  }
}

}  // namespace

SyncStream::SyncStream(device::Stream stream, int device) : OrtSyncStreamImpl{}, stream_(stream), device_(device) {
  ort_version_supported = ORT_API_VERSION;
  Release = [](OrtSyncStreamImpl* self) noexcept { delete static_cast<SyncStream*>(self); };
  GetHandle = [](OrtSyncStreamImpl* self) noexcept -> void* { return static_cast<SyncStream*>(self)->stream_; };
  CreateNotification = [](OrtSyncStreamImpl* self, OrtSyncNotificationImpl** notification) noexcept {
    return guarded([&] {
      device::use(static_cast<SyncStream*>(self)->device_);
      *notification = new Notification(static_cast<SyncStream*>(self)->stream_);
    });
  };
  Flush = [](OrtSyncStreamImpl* self) noexcept {
    return guarded([&] {
      const device::Stream stream = static_cast<SyncStream*>(self)->stream_;
      if (!device::is_capturing(stream)) device::wait(stream);
    });
  };
  OnSessionRunEnd = [](OrtSyncStreamImpl*) noexcept -> OrtStatus* { return nullptr; };
}

DataTransfer::DataTransfer() : OrtDataTransferImpl{} {
  ort_version_supported = ORT_API_VERSION;
  Release = [](OrtDataTransferImpl*) noexcept {};
  CanCopy = [](const OrtDataTransferImpl*, const OrtMemoryDevice* from, const OrtMemoryDevice* to) noexcept {
    return (is_device(from) && (is_device(to) || is_host(to))) || (is_host(from) && is_device(to));
  };
  CopyTensors = [](OrtDataTransferImpl* self, const OrtValue** from, OrtValue** to, OrtSyncStream** streams,
                   size_t count) noexcept {
    return guarded([&] {
      Upload& upload = static_cast<DataTransfer*>(self)->upload_;
      for (size_t i = 0; i < count; ++i) copy_tensor(from[i], to[i], streams == nullptr ? nullptr : streams[i], upload);
    });
  };
}

}  // namespace sd_ort
