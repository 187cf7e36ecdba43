// Loads the HIP runtime, and defines the functions that clang calls to register and launch kernels: they keep the
// registrations until the first launch and forward to the runtime. Plain C++; for AMD only.
#include "common/vendors/hip_runtime.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "common/platform.h"

namespace sd_ort {
namespace {

struct Runtime {
  void* library = nullptr;
  std::string path, error;
};

// Searches the process, the variable's folder, and by version the loader's folders and ROCm's usual one: distributions
// have old versions. Packages of pip are in none of these: Python loads theirs first
// (custom_ops/rocm.py).
Runtime load_runtime() {
  std::vector<std::string> paths = {platform::loaded_library(platform::kHipPrefix)};
  if (const char* root = std::getenv(platform::kRocmVariable)) {
    const std::string folder = std::string(root) + platform::kRocmLibraries;
    for (const char* name : platform::kHipRuntimes) paths.push_back(folder + name);
  }
  for (const char* name : platform::kHipRuntimes) {
    paths.push_back(name);
    if (platform::kRocmFolder != nullptr) paths.push_back(std::string(platform::kRocmFolder) + name);
  }
  Runtime runtime;
  std::string reason;  // of a runtime that exists and does not load
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    runtime.library = platform::load(path);
    if (runtime.library != nullptr) break;
    const std::string error = platform::load_error();
    if (reason.empty() && platform::exists(path, error)) reason = " (" + error + ")";
  }
  if (runtime.library == nullptr) {
    runtime.error =
        std::string("No HIP runtime (") + platform::kHipNames + ") was found" + reason + platform::kHipAdvice;
    return runtime;
  }
  runtime.path = platform::path_of(runtime.library);
  return runtime;
}

const Runtime& runtime() {
  static const Runtime* const loaded = new Runtime(load_runtime());  // kernels may be launched while statics end
  return *loaded;
}

// Kernels of one source file, in the order of their registration.
struct Module {
  const void* binary;
  std::vector<std::pair<const void*, const char*>> kernels;  // host function, name of the kernel
};

// Compiled code registers its kernels when the library is loaded, on one thread.
std::vector<Module*>& modules() {
  static auto* const all = new std::vector<Module*>;
  return *all;
}

// Registers all kernels with the runtime, which is as it were linked: kernels of libraries that are loaded late
// are registered late too. The runtime selects the code object of the device, of its target or a generic one.
void register_all_kernels() {
  static HipFunction<void**(const void*)> register_binary("__hipRegisterFatBinary");
  static HipFunction<void(void**, const void*, char*, const char*, unsigned, void*, void*, void*, void*, int*)>
      register_function("__hipRegisterFunction");
  platform::keep_library(&register_all_kernels);
  for (const Module* module : modules()) {
    void** const handle = register_binary(module->binary);
    for (const auto& [function, name] : module->kernels) {
      register_function(handle, function, const_cast<char*>(name), name, -1u, nullptr, nullptr, nullptr, nullptr,
                        nullptr);
    }
  }
}
void register_kernels() {
  static std::once_flag registered;
  std::call_once(registered, register_all_kernels);
}

HipFunction<decltype(::__hipPushCallConfiguration)> push_configuration("__hipPushCallConfiguration");
HipFunction<decltype(::__hipPopCallConfiguration)> pop_configuration("__hipPopCallConfiguration");
HipFunction<decltype(::hipLaunchKernel)> launch_kernel("hipLaunchKernel");
HipFunction<hipError_t(hipFuncAttributes*, const void*)> get_attributes("hipFuncGetAttributes");

}  // namespace

const char* missing_hip_runtime() { return runtime().library == nullptr ? runtime().error.c_str() : nullptr; }

const std::string& hip_runtime_path() { return runtime().path; }

void* find_hip_function(const char* name) {
  if (runtime().library == nullptr) return nullptr;
  void (*function)() = nullptr;
  platform::find(runtime().library, name, function);
  return reinterpret_cast<void*>(function);
}

}  // namespace sd_ort

extern "C" {

void** __hipRegisterFatBinary(const void* binary) {
  sd_ort::modules().push_back(new sd_ort::Module{binary, {}});
  return reinterpret_cast<void**>(sd_ort::modules().back());
}

void __hipRegisterFunction(void** module, const void* function, char*, const char* name, unsigned, void*, void*, void*,
                           void*, int*) {
  reinterpret_cast<sd_ort::Module*>(module)->kernels.emplace_back(function, name);
}

// The library is never unloaded (CMakeLists.txt: nodelete), and at the end of the process the runtime may be gone.
void __hipUnregisterFatBinary(void**) {}

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t lds_bytes, hipStream_t stream) {
  return sd_ort::push_configuration(grid, block, lds_bytes, stream);
}

hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* lds_bytes, hipStream_t* stream) {
  return sd_ort::pop_configuration(grid, block, lds_bytes, stream);
}

hipError_t hipLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t lds_bytes,
                           hipStream_t stream) {
  sd_ort::register_kernels();
  return sd_ort::launch_kernel(function, grid, block, arguments, lds_bytes, stream);
}

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* function) {
  sd_ort::register_kernels();
  return sd_ort::get_attributes(attributes, function);
}

}  // extern "C"
