// The functions of common/vendors/hip_runtime.cc that clang calls, against hip_api_trace.hpp. Macros:
// __HIP_PLATFORM_AMD__.
#include "common/vendors/hip_runtime.cc"
#include "hip_types.h"
#include "same_abi.h"

static_assert(abi::same_function<decltype(&__hipRegisterFatBinary), t___hipRegisterFatBinary>);
static_assert(abi::same_function<decltype(&__hipRegisterFunction), t___hipRegisterFunction>);
static_assert(abi::same_function<decltype(&__hipUnregisterFatBinary), t___hipUnregisterFatBinary>);
static_assert(std::is_same_v<decltype(&__hipPushCallConfiguration), t___hipPushCallConfiguration>);
static_assert(std::is_same_v<decltype(&__hipPopCallConfiguration), t___hipPopCallConfiguration>);
static_assert(std::is_same_v<decltype(&hipLaunchKernel), t_hipLaunchKernel>);
