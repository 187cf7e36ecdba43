// The two functions by which ONNX Runtime knows a library of execution providers.
#include <stdexcept>

#include "provider/factory.h"

#define SD_ORT_EXPORT extern "C" __attribute__((visibility("default")))

SD_ORT_EXPORT OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                           OrtEpFactory** factories, size_t most, size_t* count) {
  sd_ort::ort_api = base->GetApi(ORT_API_VERSION);
  if (sd_ort::ort_api == nullptr) {
    const OrtApi* old = base->GetApi(1);
    return old->CreateStatus(ORT_FAIL,
                             ("this provider was built for ONNX Runtime 1." + std::to_string(ORT_API_VERSION) +
                              " or later, and this is " + base->GetVersionString())
                                 .c_str());
  }
  sd_ort::ep_api = sd_ort::ort_api->GetEpApi();
  *count = 0;
  return sd_ort::guarded([&] {
    sd_ort::require(most >= 1, "ONNX Runtime takes no factory");
    factories[0] = new sd_ort::Factory;
    *count = 1;
  });
}

SD_ORT_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  delete static_cast<sd_ort::Factory*>(factory);
  return nullptr;
}
