// Entry points of an ONNX Runtime plugin library, and two C functions for Python.
#include <stdexcept>

#include "common/platform.h"
#include "provider/factory.h"
#include "provider/gemm.h"
#include "provider/provider.h"

SD_ORT_EXPORT OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                           OrtEpFactory** factories, size_t capacity, size_t* count) {
  sd_ort::ort_api = base->GetApi(ORT_API_VERSION);
  if (sd_ort::ort_api == nullptr) {
    const OrtApi* base_api = base->GetApi(1);
    return base_api->CreateStatus(ORT_FAIL,
                                  ("this provider was built for ONNX Runtime 1." + std::to_string(ORT_API_VERSION) +
                                   " or later, and this is " + base->GetVersionString())
                                      .c_str());
  }
  sd_ort::ep_api = sd_ort::ort_api->GetEpApi();
  *count = 0;
  return sd_ort::guarded([&] {
    sd_ort::require(capacity >= 1, "ONNX Runtime takes no factory");
    factories[0] = new sd_ort::Factory;
    *count = 1;
  });
}

// For `sd-ort explain` (provider.h). Valid until the thread creates another session.
SD_ORT_EXPORT const char* sd_ort_unassigned_nodes() { return sd_ort::last_unassigned_nodes.c_str(); }
// For a warning (gemm.h).
SD_ORT_EXPORT const char* sd_ort_missing_library() { return sd_ort::missing_library(); }

SD_ORT_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  delete static_cast<sd_ort::Factory*>(factory);
  return nullptr;
}
