// The C interface of the GPU library: what registry.cc (through dlopen) and the Python checks (through ctypes) call.
//
// Operators and their candidates go by number; names map to numbers by the functions below. `params` points to the
// operator's Params (its op.h), `stream` is a hipStream_t or cudaStream_t, null the default one. A function that can
// fail gives a message, null when all went well; messages stay valid until the thread's next call.
#include <algorithm>
#include <cstring>

#include "common/tunable.h"
#include "common/tuner.h"

namespace sd_ort {

const GpuOp& group_norm_gpu();
const GpuOp& skip_group_norm_gpu();
const GpuOp& bias_split_gelu_gpu();
const GpuOp& bias_add_gpu();
const GpuOp& skip_layer_norm_gpu();
const GpuOp& multi_head_attention_gpu();
const GpuOp& linear_add_gpu();
const GpuOp& upsample_nearest_gpu();
const GpuOp& softmax_gpu();

namespace {

const std::vector<const GpuOp*>& operators() {
  static const std::vector<const GpuOp*> all = {
      &group_norm_gpu(), &skip_group_norm_gpu(),  &bias_split_gelu_gpu(),
      &bias_add_gpu(),   &skip_layer_norm_gpu(),  &multi_head_attention_gpu(),
      &linear_add_gpu(), &upsample_nearest_gpu(), &softmax_gpu(),
  };
  return all;
}

const GpuOp& at(int op) { return *operators().at(op); }

const char* keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace
}  // namespace sd_ort

using sd_ort::at;
using sd_ort::keep;

#define SD_ORT_EXPORT extern "C" __attribute__((visibility("default")))

SD_ORT_EXPORT int sd_ort_op_count() { return static_cast<int>(sd_ort::operators().size()); }
SD_ORT_EXPORT const char* sd_ort_op_name(int op) { return at(op).name(); }

// The operator's number, or -1 when the library has none of this name with Params of this size.
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
SD_ORT_EXPORT const char* sd_ort_signature(int op, const void* params) { return keep(at(op).signature(params)); }

// The candidate to run: the tuned one, or the default. With tuning on, an unknown signature is tuned here, on this
// call's own buffers (its outputs are overwritten). -1 when no candidate supports the call.
SD_ORT_EXPORT int sd_ort_choose(int op, const void* params, void* stream) {
  return sd_ort::Tuner::instance().choose(at(op), params, stream);
}
SD_ORT_EXPORT void sd_ort_enable_tuning(int enable) { sd_ort::Tuner::instance().enable(enable != 0); }

// Tunes one call now. Null, or why no candidate won.
SD_ORT_EXPORT const char* sd_ort_tune(int op, const void* params, void* stream) {
  const std::string error = sd_ort::Tuner::instance().tune(at(op), params, stream);
  return error.empty() ? nullptr : keep(error);
}

// All results, a line each: operator, signature, candidate, microseconds, the default's microseconds; tabs between.
SD_ORT_EXPORT const char* sd_ort_tuning_results() { return keep(sd_ort::Tuner::instance().results()); }

// Takes one result of an earlier run. 0 when the library has no such operator or candidate.
SD_ORT_EXPORT int sd_ort_set_tuning_result(const char* op, const char* signature, const char* candidate) {
  for (const sd_ort::GpuOp* each : sd_ort::operators()) {
    if (std::strcmp(each->name(), op) != 0) continue;
    for (int i = 0; i < each->candidate_count(); ++i) {
      if (std::strcmp(each->candidate_name(i), candidate) != 0) continue;
      sd_ort::Tuner::instance().set(op, signature, i);
      return 1;
    }
  }
  return 0;
}
SD_ORT_EXPORT void sd_ort_clear_tuning_results() { sd_ort::Tuner::instance().clear(); }

// "gfx942" or "sm_90" of the current device; its driver's and runtime's versions; the hash of the sources and compiler
// that made the library.
SD_ORT_EXPORT const char* sd_ort_gpu_arch() { return keep(sd_ort::gpu_arch()); }
SD_ORT_EXPORT const char* sd_ort_gpu_versions() { return keep(sd_ort::gpu_versions()); }
SD_ORT_EXPORT const char* sd_ort_build_hash() { return SD_ORT_BUILD_HASH; }
