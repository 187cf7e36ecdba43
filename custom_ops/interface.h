/* C interface of the op libraries, for callers without ONNX Runtime: custom_ops/check and the torch layer through
 * ctypes, registry.cc through dlopen. Plain C. Functions are only added, at the end; sd_ort_interface_version() counts
 * the changes.
 *
 * Operators and candidates are identified by index. `params` points to the operator's Params struct (its op.h), which
 * callers mirror; find_op rejects another size. Functions that can fail return an error message, or null on success.
 * Strings are valid until the next call of the thread.
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SD_ORT_INTERFACE_VERSION 4

/* Marks exported functions, which are looked up by name. */
#if defined(_WIN32)
#define SD_ORT_API __declspec(dllexport)
#else
#define SD_ORT_API __attribute__((visibility("default")))
#endif

/* ---- all libraries: libsd_ort_ops.so, libsd_ort_hip.so and libsd_ort_cuda.so ---- */

SD_ORT_API int sd_ort_interface_version(void);

/* Hash of the sources and the compiler of the library. */
SD_ORT_API const char* sd_ort_build_hash(void);

/* ---- the GPU libraries ----
 * `stream` is a hipStream_t or cudaStream_t; null is the default stream. */

/* Operators of operators.txt with GPU kernels, in its order. */
SD_ORT_API int sd_ort_op_count(void);
SD_ORT_API const char* sd_ort_op_name(int op);
/* Returns the operator index, or -1 if the library has no operator of this name with Params of this size. */
SD_ORT_API int sd_ort_find_op(const char* name, size_t params_size);

/* Candidate 0 is the generic kernel: it supports every call and is the reference of the others. */
SD_ORT_API int sd_ort_candidate_count(int op);
SD_ORT_API const char* sd_ort_candidate_name(int op, int candidate);
SD_ORT_API int sd_ort_is_supported(int op, int candidate, const void* params);
/* Returns the bytes of uninitialized device memory that `run` needs as `workspace`. */
SD_ORT_API size_t sd_ort_workspace_bytes(int op, int candidate, const void* params);
/* Launches on the stream without allocation or synchronization. */
SD_ORT_API const char* sd_ort_run(int op, int candidate, const void* params, void* workspace, void* stream);

/* Returns the candidate for a call without a tuning result; it supports the call. */
SD_ORT_API int sd_ort_default_candidate(int op, const void* params);

/* Returns the tuned or the default candidate. If tuning is enabled, a new signature is tuned on the buffers of this
 * call (its outputs are overwritten). Returns -1 if no candidate supports the call. */
SD_ORT_API int sd_ort_choose(int op, const void* params, void* stream);

/* Returns the key of the tuning result of a call. */
SD_ORT_API const char* sd_ort_signature(int op, const void* params);
SD_ORT_API void sd_ort_enable_tuning(int enable);
/* Tunes one call. */
SD_ORT_API const char* sd_ort_tune(int op, const void* params, void* stream);
/* Returns a line per result, separated by tabs: operator, signature, candidate, microseconds, microseconds of the
 * default, faster candidates that were rejected and why ("NAME: REASON; ..."). */
SD_ORT_API const char* sd_ort_tuning_results(void);
/* Sets a stored result. Returns 0 if the library has no such operator or candidate. */
SD_ORT_API int sd_ort_set_tuning_result(const char* op, const char* signature, const char* candidate);
SD_ORT_API void sd_ort_clear_tuning_results(void);

/* Returns the architecture of the current device, such as "gfx942" or "sm_90" ("" without one); driver and runtime
 * versions. */
SD_ORT_API const char* sd_ort_gpu_arch(void);
SD_ORT_API const char* sd_ort_gpu_versions(void);

/* Replaces memset nodes of a captured, not yet instantiated cudaGraph_t by kernels; BLAS libraries create them, and
 * each costs 3 us of device time. No effect on AMD. Since version 2. */
SD_ORT_API void sd_ort_replace_memsets(void* graph);

/* Returns why the HIP runtime cannot be loaded and what to install, or null; the path of the loaded runtime, "" without
 * one. CUDA's is linked. Since version 3. */
SD_ORT_API const char* sd_ort_missing_runtime(void);
SD_ORT_API const char* sd_ort_runtime_path(void);

/* Returns whether the library has matrix instructions of float8 for the current device. Since version 4. */
SD_ORT_API int sd_ort_multiplies_float8(void);

/* ---- libsd_ort_ops.so ---- */

/* Returns a line per GPU execution provider: its library, or the load error. Valid after RegisterCustomOps. */
SD_ORT_API const char* sd_ort_gpu_status(void);

/* sd_ort_find_op for the operators of operators.txt with CPU kernels. */
SD_ORT_API int sd_ort_cpu_find_op(const char* name, size_t params_size);
/* A thread pool: runs body(context, i) for every i < count and returns when all have finished. */
typedef void (*sd_ort_parallel_for)(void* pool, void (*body)(void* context, size_t i), size_t count, void* context);
/* Runs the CPU kernel of an operator, float32 or float16. A null `parallel_for` uses this thread only. */
SD_ORT_API const char* sd_ort_cpu_run(int op, const void* params, sd_ort_parallel_for parallel_for, void* pool);

#ifdef __cplusplus
}
#endif
