// code_objects/launch_recorder.cc, which stands for the HIP runtime, against HIP's headers. Macros:
// __HIP_PLATFORM_AMD__.
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "hip_types.h"
#include "same_abi.h"

#define __hipRegisterFatBinary recorded_register_binary
#define __hipUnregisterFatBinary recorded_unregister_binary
#define __hipRegisterFunction recorded_register_function
#define __hipPushCallConfiguration recorded_push
#define __hipPopCallConfiguration recorded_pop
#define hipLaunchKernel recorded_launch
#define hipGetLastError recorded_last_error
#include "code_objects/launch_recorder.cc"
#undef __hipRegisterFatBinary
#undef __hipUnregisterFatBinary
#undef __hipRegisterFunction
#undef __hipPushCallConfiguration
#undef __hipPopCallConfiguration
#undef hipLaunchKernel
#undef hipGetLastError

static_assert(sizeof(Dim3) == sizeof(dim3) && offsetof(Dim3, z) == offsetof(dim3, z));
static_assert(hipSuccess == 0);
static_assert(abi::same_function<decltype(recorded_register_binary), t___hipRegisterFatBinary>);
static_assert(abi::same_function<decltype(recorded_unregister_binary), t___hipUnregisterFatBinary>);
static_assert(abi::same_function<decltype(recorded_register_function), t___hipRegisterFunction>);
ASSERT_SAME_FUNCTION(recorded_push, __hipPushCallConfiguration);
ASSERT_SAME_FUNCTION(recorded_pop, __hipPopCallConfiguration);
static_assert(abi::same_function<decltype(recorded_launch), t_hipLaunchKernel>);
ASSERT_SAME_FUNCTION(recorded_last_error, hipGetLastError);
