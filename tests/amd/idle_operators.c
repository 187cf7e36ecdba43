// A libsd_ort_hip.so whose kernels do nothing: every operator of interface.h with one candidate that supports each call.
// The variable SD_ORT_IDLE_WORKSPACE has the bytes of their workspaces.
#include <stdlib.h>

#include "interface.h"

int sd_ort_interface_version(void) { return SD_ORT_INTERFACE_VERSION; }
const char* sd_ort_build_hash(void) { return "idle"; }
int sd_ort_op_count(void) { return 1; }
const char* sd_ort_op_name(int op) { return "any"; }
int sd_ort_find_op(const char* name, size_t params_size) { return 0; }
int sd_ort_candidate_count(int op) { return 1; }
const char* sd_ort_candidate_name(int op, int candidate) { return "idle"; }
int sd_ort_is_supported(int op, int candidate, const void* params) { return 1; }
size_t sd_ort_workspace_bytes(int op, int candidate, const void* params) {
  const char* bytes = getenv("SD_ORT_IDLE_WORKSPACE");
  return bytes == NULL ? 0 : strtoull(bytes, NULL, 10);
}
const char* sd_ort_run(int op, int candidate, const void* params, void* workspace, void* stream) { return 0; }
int sd_ort_default_candidate(int op, const void* params) { return 0; }
int sd_ort_choose(int op, const void* params, void* stream) { return 0; }
const char* sd_ort_signature(int op, const void* params) { return "any"; }
void sd_ort_enable_tuning(int enable) {}
const char* sd_ort_tune(int op, const void* params, void* stream) { return 0; }
const char* sd_ort_tuning_results(void) { return ""; }
int sd_ort_set_tuning_result(const char* op, const char* signature, const char* candidate) { return 1; }
void sd_ort_clear_tuning_results(void) {}
const char* sd_ort_gpu_arch(void) { return "gfx1100"; }
const char* sd_ort_gpu_versions(void) { return "idle"; }
void sd_ort_replace_memsets(void* graph) {}
const char* sd_ort_missing_runtime(void) { return 0; }
const char* sd_ort_runtime_path(void) { return ""; }
int sd_ort_multiplies_float8(void) { return 0; }
