// Entry point of libsd_ort_ops.so: registers every operator for the CPU and, if a GPU library in the same folder loads,
// for the execution provider of that GPU. Only this file names execution providers of ONNX Runtime.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bindings.h"  // written by CMake: includes binding.h of every operator in operators.txt
#include "common/ort_op.h"
#include "common/platform.h"

namespace sd_ort {
namespace {

constexpr const char* kDomain = "sd_ort";

struct GpuBackend {
  const char* library;   // file name in the folder of this library
  const char* provider;  // execution provider
};

constexpr GpuBackend kBackends[] = {
    {platform::kHipLibrary, "ROCMExecutionProvider"},
    {platform::kCudaLibrary, "CUDAExecutionProvider"},
};

// Load results of the GPU libraries, for sd_ort_gpu_status().
std::string gpu_status;

void own_symbol() {}  // its address identifies this library

template <class Function>
void resolve(void* library, const char* name, Function*& function) {
  require(platform::find(library, name, function), std::string("the GPU library has no function ") + name);
}

// Loads the library of a backend, which stays loaded until the process ends. Returns null if it is missing or cannot be
// loaded (such as without a driver).
std::unique_ptr<GpuLibrary> open(const GpuBackend& backend) {
  const std::string path = platform::folder_of(own_symbol) + backend.library;
  void* library = platform::load(path);
  if (library == nullptr) {
    gpu_status += std::string(backend.provider) + ": " + platform::load_error() + "\n";
    return nullptr;
  }
  auto functions = std::make_unique<GpuLibrary>();
  resolve(library, "sd_ort_find_op", functions->find_op);
  resolve(library, "sd_ort_choose", functions->choose);
  resolve(library, "sd_ort_workspace_bytes", functions->workspace_bytes);
  resolve(library, "sd_ort_run", functions->run);
  gpu_status += std::string(backend.provider) + ": " + path + "\n";
  return functions;
}

// Owns the domain and its operators until the process ends, since sessions refer to them.
class Registry {
 public:
  Registry() {
    check(ort_api->CreateCustomOpDomain(kDomain, &domain_));
    for (const GpuBackend& backend : kBackends) {
      if (auto functions = open(backend)) {
        libraries_.push_back(std::move(functions));
        add_all(backend.provider, {DType::kFloat32, DType::kFloat16, DType::kBFloat16}, libraries_.back().get());
      }
    }
    add_all(nullptr, {DType::kFloat32, DType::kFloat16, DType::kBFloat16}, nullptr);
  }

  OrtCustomOpDomain* domain() const { return domain_; }

 private:
  void add_all(const char* provider, const std::vector<DType>& dtypes, const GpuLibrary* gpu) {
    for (DType dtype : dtypes) {
#define SD_ORT_OPERATOR(folder, name) add<name##Binding>(provider, dtype, gpu);
#define SD_ORT_CPU_OPERATOR(folder, name) \
  if (gpu == nullptr) add<name##Binding>(provider, dtype, gpu);
#include "operators.txt"
    }
  }

  template <class Binding>
  void add(const char* provider, DType dtype, const GpuLibrary* gpu) {
    if (gpu == nullptr && dtype == DType::kBFloat16 && !kSupportsBFloat16<Binding>) return;
    add<Binding>(provider, dtype, gpu, DType::kFloat32);
    const bool second = std::any_of(std::begin(Binding::kOutputs), std::end(Binding::kOutputs),
                                    [](const Port& port) { return port.type == Port::kU; });
    if (second) add<Binding>(provider, dtype, gpu, DType::kBFloat16);
  }

  template <class Binding>
  void add(const char* provider, DType dtype, const GpuLibrary* gpu, DType second) {
    auto op = std::make_shared<CustomOp<Binding>>(provider, dtype, gpu, second);
    require(op->available(), std::string(Binding::kName) + " is not in the GPU library beside this one; rebuild both");
    check(ort_api->CustomOpDomain_Add(domain_, op.get()));
    ops_.push_back(op);
  }

  OrtCustomOpDomain* domain_ = nullptr;
  std::vector<std::unique_ptr<GpuLibrary>> libraries_;
  std::vector<std::shared_ptr<OrtCustomOp>> ops_;
};

}  // namespace
}  // namespace sd_ort

SD_ORT_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  sd_ort::ort_api = base->GetApi(sd_ort::kApiVersion);
  if (sd_ort::ort_api == nullptr) return nullptr;  // no API to report with; ONNX Runtime then reports missing kernels
  std::sscanf(base->GetVersionString(), "1.%d", &sd_ort::ort_minor_version);
  return sd_ort::guarded([&] {
    static sd_ort::Registry registry;
    sd_ort::check(sd_ort::ort_api->AddCustomOpDomain(options, registry.domain()));
  });
}

SD_ORT_EXPORT const char* sd_ort_gpu_status() { return sd_ort::gpu_status.c_str(); }
