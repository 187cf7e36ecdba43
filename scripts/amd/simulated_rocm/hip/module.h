// Modules: the kernels of one image, and the images that libraries register when they are loaded.
#pragma once

#include "kernel.h"

namespace simulated {

class Module {
 public:
  explicit Module(const void* image) : image_(image) {}

  // Loads the code object on the first call; hipErrorNoBinaryForGpu or hipErrorInvalidImage with a message.
  hipError_t load();
  // The kernel of this name; hipErrorNotFound if the code object has none.
  hipError_t find_kernel(const std::string& name, Kernel** kernel);
  std::pair<void*, size_t> find_variable(const std::string& name) const { return code_->find_variable(name); }

  void add_use(std::map<std::string, KernelUse>* kernels) const;

 private:
  const void* image_;
  mutable std::mutex mutex_;
  std::unique_ptr<CodeObject> code_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

// A module that lives until the process ends: the report reads its kernels.
Module* create_module(const void* image);

// Registration of a library's kernels by the address of their host functions.
void register_function(Module* module, const void* host_function, const std::string& name);
void unregister_functions(Module* module);
// hipErrorInvalidDeviceFunction if no library registered the function.
hipError_t find_registered_kernel(const void* host_function, Kernel** kernel);

// Use of all kernels by name.
std::map<std::string, KernelUse> kernel_use();

}  // namespace simulated
