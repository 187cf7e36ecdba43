// Exported functions of kernels and modules, and those that compiled host code calls to register and launch them.
// clang-format off: HIP's headers in the order that they need
#include "call.h"

#include <hip/hip_deprecated.h>
#include <hip/hip_gl_interop.h>
#include <hip/amd_detail/hip_api_trace.hpp>
// clang-format on

#include <fstream>
#include <iterator>

#include "module.h"
#include "stream.h"

namespace simulated {
namespace {

constexpr uint32_t kWrapperMagic = 0x48495046;  // "HIPF"

// What __hipRegisterFatBinary gets from compiled host code.
struct FatBinaryWrapper {
  uint32_t magic, version;
  const void* image;
  void* unused;
};

struct LaunchConfiguration {
  dim3 grid, block;
  size_t dynamic_lds_bytes;
  hipStream_t stream;
};
thread_local std::vector<LaunchConfiguration> launch_configurations;

// Size of the kernarg buffer among HIP_LAUNCH_PARAM_... in `extra`, or false.
bool read_extra(void** extra, const void** buffer, size_t* bytes) {
  *buffer = nullptr;
  for (; *extra != HIP_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] == HIP_LAUNCH_PARAM_BUFFER_POINTER)
      *buffer = extra[1];
    else if (extra[0] == HIP_LAUNCH_PARAM_BUFFER_SIZE)
      *bytes = *static_cast<size_t*>(extra[1]);
    else
      return false;
  }
  return *buffer != nullptr;
}

hipError_t launch(Kernel* kernel, const LaunchDimensions& dimensions, void** arguments, void** extra,
                  hipStream_t stream) {
  if (arguments != nullptr && extra != nullptr) return hipErrorInvalidValue;
  const hipError_t status = kernel->check(dimensions);
  if (status != hipSuccess) return status;
  std::vector<uint8_t> kernarg;
  if (extra != nullptr) {
    const void* buffer;
    size_t bytes = 0;
    if (!read_extra(extra, &buffer, &bytes)) return hipErrorInvalidValue;
    kernarg = kernel->pack(dimensions, buffer, bytes);
  } else {
    if (arguments == nullptr && !kernel->description().arguments.empty()) return hipErrorInvalidValue;
    kernarg = kernel->pack(dimensions, arguments);
  }
  return submit(stream, [kernel, dimensions, kernarg = std::move(kernarg)] { kernel->run(dimensions, kernarg); });
}

// hipFunction_t is the kernel of a module.
Kernel* to_kernel(hipFunction_t function) { return reinterpret_cast<Kernel*>(function); }
Module* to_module(hipModule_t module) { return reinterpret_cast<Module*>(module); }

hipError_t load_module(hipModule_t* handle, const void* image) {
  if (handle == nullptr || image == nullptr) return hipErrorInvalidValue;
  Module* module = create_module(image);
  *handle = reinterpret_cast<hipModule_t>(module);
  return module->load();
}

struct WriteReportAtExit {
  ~WriteReportAtExit() { write_report(); }
} write_report_at_exit;

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

void** __hipRegisterFatBinary(const void* data) {
  count_call("__hipRegisterFatBinary");
  const auto* wrapper = static_cast<const FatBinaryWrapper*>(data);
  if (wrapper->magic != kWrapperMagic) fail("__hipRegisterFatBinary: no fat binary of HIP.");
  return reinterpret_cast<void**>(create_module(wrapper->image));
}

void __hipUnregisterFatBinary(void** module) { unregister_functions(reinterpret_cast<Module*>(module)); }

void __hipRegisterFunction(void** module, const void* host_function, char*, const char* name, unsigned, uint3*, uint3*,
                           dim3*, dim3*, int*) {
  register_function(reinterpret_cast<Module*>(module), host_function, name);
}

// Device variables are not copied to: no library here sets one from the host.
void __hipRegisterVar(void**, void*, char*, char*, int, size_t, int, int) {}

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t dynamic_lds_bytes, hipStream_t stream) {
  launch_configurations.push_back({grid, block, dynamic_lds_bytes, stream});
  return hipSuccess;
}

hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* dynamic_lds_bytes, hipStream_t* stream) {
  if (launch_configurations.empty()) return keep_error(hipErrorInvalidValue);
  const LaunchConfiguration top = launch_configurations.back();
  launch_configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *dynamic_lds_bytes = top.dynamic_lds_bytes;
  *stream = top.stream;
  return hipSuccess;
}

hipError_t hipLaunchKernel(const void* host_function, dim3 grid, dim3 block, void** arguments, size_t dynamic_lds_bytes,
                           hipStream_t stream) {
  return call(__func__, [&] {
    Kernel* kernel = nullptr;
    const hipError_t status = find_registered_kernel(host_function, &kernel);
    if (status != hipSuccess) return status;
    if (dynamic_lds_bytes > settings().lds_bytes) return hipErrorInvalidValue;
    return launch(kernel, {grid, block, static_cast<uint32_t>(dynamic_lds_bytes)}, arguments, nullptr, stream);
  });
}

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* host_function) {
  return call(__func__, [&] {
    if (attributes == nullptr) return hipErrorInvalidValue;
    Kernel* kernel = nullptr;
    const hipError_t status = find_registered_kernel(host_function, &kernel);
    if (status != hipSuccess) return status;
    const KernelDescription& description = kernel->description();
    *attributes = {};
    attributes->sharedSizeBytes = description.lds_bytes;
    attributes->localSizeBytes = description.scratch_bytes;
    attributes->maxThreadsPerBlock = static_cast<int>(description.max_threads);
    return hipSuccess;
  });
}

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  return call(__func__, [&] { return load_module(module, image); });
}

hipError_t hipModuleLoadDataEx(hipModule_t* module, const void* image, unsigned, hipJitOption*, void**) {
  return call(__func__, [&] { return load_module(module, image); });
}

hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  return call(__func__, [&] {
    if (path == nullptr) return hipErrorInvalidValue;
    std::ifstream file(path, std::ios::binary);
    if (!file) return hipErrorFileNotFound;
    const std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return load_module(module, image.data());  // copies what it needs
  });
}

hipError_t hipModuleUnload(hipModule_t module) {
  return call(__func__, [&] { return module == nullptr ? hipErrorInvalidResourceHandle : hipSuccess; });
}

hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  return call(__func__, [&] {
    if (function == nullptr || name == nullptr) return hipErrorInvalidValue;
    if (module == nullptr) return hipErrorInvalidResourceHandle;
    Kernel* kernel = nullptr;
    const hipError_t status = to_module(module)->find_kernel(name, &kernel);
    *function = reinterpret_cast<hipFunction_t>(kernel);
    return status;
  });
}

hipError_t hipModuleGetGlobal(hipDeviceptr_t* address, size_t* bytes, hipModule_t module, const char* name) {
  return call(__func__, [&] {
    if (name == nullptr) return hipErrorInvalidValue;
    const auto [variable, size] = to_module(module)->find_variable(name);
    if (variable == nullptr) return hipErrorNotFound;
    if (address != nullptr) *address = variable;
    if (bytes != nullptr) *bytes = size;
    return hipSuccess;
  });
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned dynamic_lds_bytes,
                                 hipStream_t stream, void** arguments, void** extra) {
  return call(__func__, [&] {
    if (function == nullptr) return hipErrorInvalidImage;
    const LaunchDimensions dimensions{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_lds_bytes};
    return launch(to_kernel(function), dimensions, arguments, extra, stream);
  });
}

// Its grid counts threads, not blocks.
hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t threads_x, uint32_t threads_y, uint32_t threads_z,
                                    uint32_t block_x, uint32_t block_y, uint32_t block_z, size_t dynamic_lds_bytes,
                                    hipStream_t stream, void** arguments, void** extra, hipEvent_t start,
                                    hipEvent_t stop, uint32_t) {
  return call(__func__, [&] {
    if (function == nullptr) return hipErrorInvalidImage;
    if (block_x == 0 || block_y == 0 || block_z == 0) return hipErrorInvalidConfiguration;
    if (threads_x % block_x != 0 || threads_y % block_y != 0 || threads_z % block_z != 0) {
      print_message("hipExtModuleLaunchKernel: a grid of partial blocks is not simulated.");
      return hipErrorInvalidValue;
    }
    if (start != nullptr) static_cast<void>(record_event(start, stream));
    const LaunchDimensions dimensions{{threads_x / block_x, threads_y / block_y, threads_z / block_z},
                                      {block_x, block_y, block_z},
                                      static_cast<uint32_t>(dynamic_lds_bytes)};
    const hipError_t status = launch(to_kernel(function), dimensions, arguments, extra, stream);
    return stop == nullptr || status != hipSuccess ? status : record_event(stop, stream);
  });
}

}  // extern "C"

// hip_runtime_api.h does not declare these: compiled host code does, and hip_ext.h, which is for clang.
static_assert(std::is_same_v<decltype(&hipExtModuleLaunchKernel), t_hipExtModuleLaunchKernel>);
static_assert(std::is_same_v<decltype(&__hipRegisterFatBinary), t___hipRegisterFatBinary>);
static_assert(std::is_same_v<decltype(&__hipUnregisterFatBinary), t___hipUnregisterFatBinary>);
static_assert(std::is_same_v<decltype(&__hipRegisterFunction), t___hipRegisterFunction>);
static_assert(std::is_same_v<decltype(&__hipRegisterVar), t___hipRegisterVar>);
static_assert(std::is_same_v<decltype(&__hipPushCallConfiguration), t___hipPushCallConfiguration>);
static_assert(std::is_same_v<decltype(&__hipPopCallConfiguration), t___hipPopCallConfiguration>);
