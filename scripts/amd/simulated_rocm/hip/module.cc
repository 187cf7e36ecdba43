#include "module.h"

#include <stdexcept>
#include <unordered_map>

#include "settings.h"

namespace simulated {
namespace {

struct RegisteredFunction {
  Module* module;
  std::string name;
  Kernel* kernel = nullptr;  // after the first launch
};

struct State {
  std::mutex mutex;
  std::vector<std::unique_ptr<Module>> modules;
  std::unordered_map<const void*, RegisteredFunction> functions;
};

State& state() {
  static auto* instance = new State;  // never destroyed: libraries unregister at exit
  return *instance;
}

}  // namespace

hipError_t Module::load() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (code_ != nullptr) return hipSuccess;
  std::string reason;
  const uint8_t* elf = find_code_object(image_, &reason);
  if (elf == nullptr) {
    print_message("%s.", reason.c_str());
    return hipErrorNoBinaryForGpu;
  }
  try {
    code_ = std::make_unique<CodeObject>(elf);
  } catch (const std::exception& error) {
    print_message("%s.", error.what());
    return hipErrorInvalidImage;
  }
  return hipSuccess;
}

hipError_t Module::find_kernel(const std::string& name, Kernel** kernel) {
  const hipError_t status = load();
  if (status != hipSuccess) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  const KernelDescription* description = code_->find_kernel(name);
  if (description == nullptr) return hipErrorNotFound;
  std::unique_ptr<Kernel>& found = kernels_[name];
  if (found == nullptr) found = std::make_unique<Kernel>(*description);
  *kernel = found.get();
  return hipSuccess;
}

void Module::add_use(std::map<std::string, KernelUse>* kernels) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, kernel] : kernels_) {
    const KernelUse use = kernel->use();
    KernelUse& sum = (*kernels)[name];
    sum.launches += use.launches;
    sum.waves += use.waves;
    sum.wave_instructions += use.wave_instructions;
    sum.seconds += use.seconds;
  }
}

Module* create_module(const void* image) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().modules.push_back(std::make_unique<Module>(image));
  return state().modules.back().get();
}

void register_function(Module* module, const void* host_function, const std::string& name) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().functions[host_function] = {module, name};
}

void unregister_functions(Module* module) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (auto function = state().functions.begin(); function != state().functions.end();)
    function = function->second.module == module ? state().functions.erase(function) : std::next(function);
}

hipError_t find_registered_kernel(const void* host_function, Kernel** kernel) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().functions.find(host_function);
  if (found == state().functions.end()) return hipErrorInvalidDeviceFunction;
  RegisteredFunction& function = found->second;
  if (function.kernel == nullptr) {
    const hipError_t status = function.module->find_kernel(function.name, &function.kernel);
    if (status != hipSuccess) return status == hipErrorNotFound ? hipErrorInvalidDeviceFunction : status;
  }
  *kernel = function.kernel;
  return hipSuccess;
}

std::map<std::string, KernelUse> kernel_use() {
  std::map<std::string, KernelUse> kernels;
  std::lock_guard<std::mutex> lock(state().mutex);
  for (const std::unique_ptr<Module>& module : state().modules) module->add_use(&kernels);
  return kernels;
}

}  // namespace simulated
