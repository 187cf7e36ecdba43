// CPU functions of interface.h: the CPU kernels without ONNX Runtime.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.h"
#include "common/platform.h"
#include "interface.h"

namespace sd_ort {
namespace {

struct CpuOp {
  const char* name;
  size_t params_size;
  void (*run)(const void* params, const Parallel& parallel);
};

template <class Binding>
CpuOp cpu_op() {
  using Params = typename Binding::Params;
  return {Binding::kName, sizeof(Params), [](const void* params, const Parallel& parallel) {
            Binding::cpu(*static_cast<const Params*>(params), parallel);
          }};
}

const std::vector<CpuOp>& operators() {
  static const std::vector<CpuOp> all = {
#define SD_ORT_OPERATOR(folder, name) cpu_op<name##Binding>(),
#define SD_ORT_CPU_OPERATOR(folder, name) cpu_op<name##Binding>(),
#include "operators.txt"
  };
  return all;
}

void run_serially(void*, Parallel::Body body, size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}

}  // namespace
}  // namespace sd_ort

SD_ORT_EXPORT int sd_ort_interface_version() { return SD_ORT_INTERFACE_VERSION; }
SD_ORT_EXPORT const char* sd_ort_build_hash() { return SD_ORT_BUILD_HASH; }

SD_ORT_EXPORT int sd_ort_cpu_find_op(const char* name, size_t params_size) {
  const auto& all = sd_ort::operators();
  const auto found = std::find_if(all.begin(), all.end(), [&](const sd_ort::CpuOp& op) {
    return std::strcmp(op.name, name) == 0 && op.params_size == params_size;
  });
  return found == all.end() ? -1 : static_cast<int>(found - all.begin());
}

SD_ORT_EXPORT const char* sd_ort_cpu_run(int op, const void* params, sd_ort_parallel_for parallel_for, void* pool) {
  static thread_local std::string message;
  try {
    sd_ort::operators().at(op).run(
        params, sd_ort::Parallel(parallel_for == nullptr ? sd_ort::run_serially : parallel_for, pool));
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
