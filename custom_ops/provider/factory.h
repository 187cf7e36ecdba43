// OrtEpFactory of the provider: devices, their memory infos, and the kernel registry that all sessions share.
#pragma once

#include <memory>
#include <vector>

#include "provider/ort.h"
#include "provider/stream.h"

namespace sd_ort {

class Factory : public OrtEpFactory {
 public:
  Factory();
  ~Factory();
  Factory(const Factory&) = delete;
  Factory& operator=(const Factory&) = delete;

 private:
  struct Memory {
    OrtMemoryInfo* device = nullptr;
    OrtMemoryInfo* pinned = nullptr;
  };

  static Factory& of(OrtEpFactory* self) { return *static_cast<Factory*>(self); }
  void set_names();
  void set_factory_functions();
  size_t list_devices(const OrtHardwareDevice* const* hardware, size_t count, OrtEpDevice** devices, size_t most);
  OrtEpDevice* describe(const OrtHardwareDevice* hardware, int ordinal);
  OrtEp* create(const OrtSessionOptions* session, const OrtLogger* logger);

  std::vector<Memory> memory_;  // one per device
  OrtKernelRegistry* registry_ = nullptr;
  DataTransfer transfer_;
};

}  // namespace sd_ort
