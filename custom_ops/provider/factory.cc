#include "provider/factory.h"

#include "provider/allocator.h"
#include "provider/device.h"
#include "provider/kernel.h"
#include "provider/options.h"
#include "provider/provider.h"

namespace sd_ort {
namespace {

// The alignment is 0 although blocks are aligned to 256 bytes, because ONNX Runtime compares it between memory infos.
// With another alignment, buffers that another provider allocated on this device (such as CUDA's) would count as
// another memory and be copied when they are bound, instead of being read in place.
OrtMemoryInfo* create_memory_info(const std::string& name, int device, OrtDeviceMemoryType type) {
  OrtMemoryInfo* created = nullptr;
  check(ort_api->CreateMemoryInfo_V2(name.c_str(), OrtMemoryInfoDeviceType_GPU, device::kVendorId,
                                     static_cast<uint32_t>(device), type, 0, OrtDeviceAllocator, &created));
  return created;
}

}  // namespace

Factory::Factory() : OrtEpFactory{} {
  for (int device = 0; device < device::count(); ++device) {
    memory_.push_back(
        {create_memory_info(device::kMemory, device, OrtDeviceMemoryType_DEFAULT),
         create_memory_info(std::string(device::kMemory) + "Pinned", device, OrtDeviceMemoryType_HOST_ACCESSIBLE)});
  }
  registry_ = create_registry();
  ort_version_supported = ORT_API_VERSION;
  set_names();
  set_factory_functions();
}

Factory::~Factory() {
  ep_api->ReleaseKernelRegistry(registry_);
  for (const Memory& memory : memory_) {
    ort_api->ReleaseMemoryInfo(memory.device);
    ort_api->ReleaseMemoryInfo(memory.pinned);
  }
}

void Factory::set_names() {
  GetName = [](const OrtEpFactory*) noexcept { return device::kProvider; };
  GetVendor = [](const OrtEpFactory*) noexcept { return "sd-ort"; };
  GetVendorId = [](const OrtEpFactory*) noexcept { return device::kVendorId; };
  GetVersion = [](const OrtEpFactory*) noexcept { return "1.0.0"; };
  GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* hardware, size_t count,
                           OrtEpDevice** devices, size_t capacity, size_t* found) noexcept {
    return guarded([&] { *found = of(self).list_devices(hardware, count, devices, capacity); });
  };
}

void Factory::set_factory_functions() {
  CreateEp = [](OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                const OrtSessionOptions* session, const OrtLogger* logger,
                OrtEp** ep) noexcept { return guarded([&] { *ep = of(self).create(session, logger); }); };
  ReleaseEp = [](OrtEpFactory*, OrtEp* ep) noexcept { delete static_cast<Provider*>(ep); };
  CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo* memory, const OrtKeyValuePairs*,
                       OrtAllocator** allocator) noexcept {
    return guarded([&] {
      const OrtMemoryDevice* device = ep_api->MemoryInfo_GetMemoryDevice(memory);
      if (ep_api->MemoryDevice_GetMemoryType(device) == OrtDeviceMemoryType_HOST_ACCESSIBLE) {
        *allocator = new PinnedAllocator(memory);
      } else {
        const int ordinal = static_cast<int>(ep_api->MemoryDevice_GetDeviceId(device));
        *allocator = new DeviceAllocator(memory, std::make_shared<Pool>(ordinal, SIZE_MAX));
      }
    });
  };
  ReleaseAllocator = [](OrtEpFactory*, OrtAllocator* allocator) noexcept {
    const OrtMemoryDevice* device = ep_api->MemoryInfo_GetMemoryDevice(allocator->Info(allocator));
    if (ep_api->MemoryDevice_GetMemoryType(device) == OrtDeviceMemoryType_HOST_ACCESSIBLE) {
      delete static_cast<PinnedAllocator*>(allocator);
    } else {
      delete static_cast<DeviceAllocator*>(allocator);
    }
  };
  CreateDataTransfer = [](OrtEpFactory* self, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = &of(self).transfer_;
    return nullptr;
  };
  IsStreamAware = [](const OrtEpFactory*) noexcept { return true; };
  CreateSyncStreamForDevice = [](OrtEpFactory*, const OrtMemoryDevice*, const OrtKeyValuePairs*,
                                 OrtSyncStreamImpl** stream) noexcept -> OrtStatus* {
    *stream = nullptr;  // streams belong to the sessions
    return nullptr;
  };
}

// Lists the vendor's GPUs that ONNX Runtime found, in its order, which is assumed to be the driver's. If it found none
// (hidden by a virtual machine, or the device is simulated), the driver's devices are listed under the CPU's hardware.
size_t Factory::list_devices(const OrtHardwareDevice* const* hardware, size_t count, OrtEpDevice** devices,
                             size_t capacity) {
  std::vector<const OrtHardwareDevice*> found;
  const OrtHardwareDevice* cpu = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const OrtHardwareDeviceType type = ort_api->HardwareDevice_Type(hardware[i]);
    if (type == OrtHardwareDeviceType_CPU) cpu = hardware[i];
    if (type == OrtHardwareDeviceType_GPU && ort_api->HardwareDevice_VendorId(hardware[i]) == device::kVendorId) {
      found.push_back(hardware[i]);
    }
  }
  size_t listed = 0;
  for (size_t ordinal = 0; ordinal < memory_.size() && listed < capacity; ++ordinal) {
    const OrtHardwareDevice* device = ordinal < found.size() ? found[ordinal] : cpu;
    if (device != nullptr) devices[listed++] = describe(device, static_cast<int>(ordinal));
  }
  return listed;
}

OrtEpDevice* Factory::describe(const OrtHardwareDevice* hardware, int ordinal) {
  const device::Properties properties = device::properties(ordinal);
  OrtHandle<OrtKeyValuePairs> metadata(ort_api->ReleaseKeyValuePairs), options(ort_api->ReleaseKeyValuePairs);
  ort_api->CreateKeyValuePairs(metadata.out());
  ort_api->CreateKeyValuePairs(options.out());
  ort_api->AddKeyValuePair(metadata.get(), "device", properties.name.c_str());
  ort_api->AddKeyValuePair(metadata.get(), "device_id", std::to_string(ordinal).c_str());
  ort_api->AddKeyValuePair(metadata.get(), "memory", std::to_string(properties.memory).c_str());
  OrtEpDevice* created = nullptr;
  check(ep_api->CreateEpDevice(this, hardware, metadata.get(), options.get(), &created));
  check(ep_api->EpDevice_AddAllocatorInfo(created, memory_[ordinal].device));
  check(ep_api->EpDevice_AddAllocatorInfo(created, memory_[ordinal].pinned));
  return created;
}

OrtEp* Factory::create(const OrtSessionOptions* session, const OrtLogger* logger) {
  const Options options = read_options(session, device::kProvider);
  require(static_cast<size_t>(options.device_id) < memory_.size(),
          "option device_id is " + std::to_string(options.device_id) + ", and there are " +
              std::to_string(memory_.size()) + " devices");
  return new Provider(options, registry_, memory_[options.device_id].device, logger);
}

}  // namespace sd_ort
