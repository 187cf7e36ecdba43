// GPU functions of interface.h, for registry.cc, the provider and Python. The operators are those of operators.txt and,
// in a provider library, Gemm.
#include <algorithm>
#include <cstring>

#include "common/platform.h"
#include "common/tunable.h"
#include "common/tuner.h"
#include "interface.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {

#define SD_ORT_OPERATOR(folder, name) const GpuOp& folder##_gpu();
#define SD_ORT_GPU_OPERATOR(folder, name) const GpuOp& folder##_gpu();
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"
#if defined(SD_ORT_PROVIDER)
const GpuOp& gemm_op();
#endif

namespace {

const std::vector<const GpuOp*>& operators() {
  static const std::vector<const GpuOp*> all = {
#define SD_ORT_OPERATOR(folder, name) &folder##_gpu(),
#define SD_ORT_GPU_OPERATOR(folder, name) &folder##_gpu(),
#define SD_ORT_PROVIDER_OPERATOR SD_ORT_OPERATOR
#include "operators.txt"
#if defined(SD_ORT_PROVIDER)
      &gemm_op(),
#endif
  };
  return all;
}

const GpuOp& at(int op) { return *operators().at(op); }

const char* thread_string(std::string text) {
  static thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace
}  // namespace sd_ort

using sd_ort::at;
using sd_ort::thread_string;
using sd_ort::Tuner;

SD_ORT_EXPORT int sd_ort_interface_version() { return SD_ORT_INTERFACE_VERSION; }
SD_ORT_EXPORT const char* sd_ort_build_hash() { return SD_ORT_BUILD_HASH; }

SD_ORT_EXPORT int sd_ort_op_count() { return static_cast<int>(sd_ort::operators().size()); }
SD_ORT_EXPORT const char* sd_ort_op_name(int op) { return at(op).name(); }
SD_ORT_EXPORT int sd_ort_find_op(const char* name, size_t params_size) {
  for (int op = 0; op < sd_ort_op_count(); ++op) {
    if (std::strcmp(at(op).name(), name) == 0 && at(op).params_size() == params_size) return op;
  }
  return -1;
}

SD_ORT_EXPORT int sd_ort_candidate_count(int op) { return at(op).candidate_count(); }
SD_ORT_EXPORT const char* sd_ort_candidate_name(int op, int candidate) { return at(op).candidate_name(candidate); }
SD_ORT_EXPORT int sd_ort_is_supported(int op, int candidate, const void* params) {
  return at(op).is_supported(candidate, params);
}
SD_ORT_EXPORT size_t sd_ort_workspace_bytes(int op, int candidate, const void* params) {
  return at(op).workspace_bytes(candidate, params);
}
SD_ORT_EXPORT const char* sd_ort_run(int op, int candidate, const void* params, void* workspace, void* stream) {
  return at(op).run(candidate, params, workspace, stream);
}

SD_ORT_EXPORT int sd_ort_default_candidate(int op, const void* params) { return at(op).default_candidate(params); }
SD_ORT_EXPORT int sd_ort_choose(int op, const void* params, void* stream) {
  return Tuner::instance().choose(at(op), params, stream);
}
SD_ORT_EXPORT const char* sd_ort_signature(int op, const void* params) {
  return thread_string(at(op).signature(params));
}
SD_ORT_EXPORT void sd_ort_enable_tuning(int enable) { Tuner::instance().enable(enable != 0); }
SD_ORT_EXPORT const char* sd_ort_tune(int op, const void* params, void* stream) {
  const std::string error = Tuner::instance().tune(at(op), params, stream);
  return error.empty() ? nullptr : thread_string(error);
}
SD_ORT_EXPORT const char* sd_ort_tuning_results() { return thread_string(Tuner::instance().results()); }
SD_ORT_EXPORT int sd_ort_set_tuning_result(const char* op, const char* signature, const char* candidate) {
  for (const sd_ort::GpuOp* op_entry : sd_ort::operators()) {
    if (std::strcmp(op_entry->name(), op) != 0) continue;
    for (int i = 0; i < op_entry->candidate_count(); ++i) {
      if (std::strcmp(op_entry->candidate_name(i), candidate) != 0) continue;
      Tuner::instance().set(op, signature, i);
      return 1;
    }
  }
  return 0;
}
SD_ORT_EXPORT void sd_ort_clear_tuning_results() { Tuner::instance().clear(); }

SD_ORT_EXPORT void sd_ort_replace_memsets(void* graph) { sd_ort::replace_memsets_of(graph); }

SD_ORT_EXPORT const char* sd_ort_gpu_arch() { return thread_string(sd_ort::gpu_arch()); }
SD_ORT_EXPORT const char* sd_ort_gpu_versions() { return thread_string(sd_ort::gpu_versions()); }
SD_ORT_EXPORT const char* sd_ort_missing_runtime() { return sd_ort::missing_runtime(); }
SD_ORT_EXPORT const char* sd_ort_runtime_path() { return thread_string(sd_ort::runtime_path()); }
SD_ORT_EXPORT int sd_ort_multiplies_float8() { return sd_ort::nhwc_conv_has_float8(); }
