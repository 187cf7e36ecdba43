// The vendor that compiles this: HIP, CUDA, or the host that stands in for them (SD_ORT_HOST_VENDOR).
#pragma once

#if defined(SD_ORT_HOST_VENDOR)
#include "common/vendors/host.h"
#else
#include "common/gpu.h"
#define SD_ORT_HOST 0
#define SD_ORT_DEVICE __device__ inline
#endif
