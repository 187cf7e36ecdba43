// Runs a function of an index for every index on the device. Functions are plain structs with
// `SD_ORT_DEVICE void operator()(uint32_t i) const`: one source for HIP, CUDA and the simulated device.
//
// Launch: block (256, 1, 1), grid (ceil(count / 256), 1, 1), no LDS.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

#if SD_ORT_SIMULATED
template <class Function>
const char* for_each(int64_t count, const Function& function, void* stream) {
  if (count > INT32_MAX) return "a tensor has more than 2^31 elements";
  static_cast<SimulatedStream*>(stream)->launch([=] {
    for (int64_t i = 0; i < count; ++i) function(static_cast<uint32_t>(i));
  });
  return nullptr;
}
#else
template <class Function>
__global__ __launch_bounds__(256) void for_each_kernel(Function function, uint32_t count) {
  wait_for_predecessor();
  const uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) function(i);
}

template <class Function>
const char* for_each(int64_t count, const Function& function, void* stream) {
  if (count == 0) return nullptr;
  if (count > INT32_MAX) return "a tensor has more than 2^31 elements";
  return launch(for_each_kernel<Function>, dim3(ceil_div(count, 256)), dim3(256), 0, stream, function, count);
}
#endif

}  // namespace sd_ort
