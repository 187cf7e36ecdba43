// Vendor of this compilation. Includes no vendor header, so plain C++ may use it too.
#pragma once

#if defined(SD_ORT_SIMULATED_DEVICE)
#define SD_ORT_SIMULATED 1
#define SD_ORT_HIP 0
#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIP_PLATFORM_AMD__)
#define SD_ORT_SIMULATED 0
#define SD_ORT_HIP 1
#else
#define SD_ORT_SIMULATED 0
#define SD_ORT_HIP 0
#endif

namespace sd_ort {

constexpr bool kHip = SD_ORT_HIP;

}  // namespace sd_ort
