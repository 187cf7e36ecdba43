/* The C interface of the operator libraries, for whoever calls their kernels without ONNX Runtime: custom_ops/check
 * through ctypes, the execution provider and the torch layer through dlopen. Plain C. It grows at its end only;
 * sd_ort_interface_version() counts its changes.
 *
 * Operators and their candidates go by number; names map to numbers by the functions below. `params` points to the
 * operator's Params, the plain struct of its folder's op.h: callers mirror it and give its size to find_op, which
 * refuses another. A function that can fail gives a message, null when all went well; messages and other strings stay
 * valid until the thread's next call.
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SD_ORT_INTERFACE_VERSION 2

/* What a library exports; whoever loads it asks for functions by their names. */
#if defined(_WIN32)
#define SD_ORT_API __declspec(dllexport)
#else
#define SD_ORT_API __attribute__((visibility("default")))
#endif

/* ---- both: libsd_ort_ops.so, and the GPU libraries libsd_ort_hip.so and libsd_ort_cuda.so ---- */

SD_ORT_API int sd_ort_interface_version(void);

/* Hash of the sources and the compiler that made the library. */
SD_ORT_API const char* sd_ort_build_hash(void);

/* ---- the GPU libraries ----
 * `stream` is a hipStream_t or cudaStream_t, null the default one. */

/* Operators are those of operators.txt that have GPU kernels, in its order. */
SD_ORT_API int sd_ort_op_count(void);
SD_ORT_API const char* sd_ort_op_name(int op);
/* The operator's number, or -1 when the library has none of this name with Params of this size. */
SD_ORT_API int sd_ort_find_op(const char* name, size_t params_size);

/* Candidate 0 is the plainest kernel: it takes every call, and the others are held to its results. */
SD_ORT_API int sd_ort_candidate_count(int op);
SD_ORT_API const char* sd_ort_candidate_name(int op, int candidate);
SD_ORT_API int sd_ort_is_supported(int op, int candidate, const void* params);
/* Bytes of device memory, with any contents, that `run` wants as `workspace`. */
SD_ORT_API size_t sd_ort_workspace_bytes(int op, int candidate, const void* params);
/* Launches on the stream; allocates nothing and waits for nothing. */
SD_ORT_API const char* sd_ort_run(int op, int candidate, const void* params, void* workspace, void* stream);

/* The candidate that runs a call which was never measured; it supports the call. */
SD_ORT_API int sd_ort_default_candidate(int op, const void* params);

/* The candidate to run: the tuned one, or the default. With tuning on, an unknown signature is tuned here, on this
 * call's own buffers (its outputs are overwritten). -1 when no candidate supports the call. */
SD_ORT_API int sd_ort_choose(int op, const void* params, void* stream);

/* The key of a call's tuning result: two calls with one signature have one best candidate. */
SD_ORT_API const char* sd_ort_signature(int op, const void* params);
SD_ORT_API void sd_ort_enable_tuning(int enable);
/* Tunes one call now. */
SD_ORT_API const char* sd_ort_tune(int op, const void* params, void* stream);
/* All results, a line each: operator, signature, candidate, microseconds, the default's microseconds; tabs between. */
SD_ORT_API const char* sd_ort_tuning_results(void);
/* Takes one result of an earlier run. 0 when the library has no such operator or candidate. */
SD_ORT_API int sd_ort_set_tuning_result(const char* op, const char* signature, const char* candidate);
SD_ORT_API void sd_ort_clear_tuning_results(void);

/* "gfx942" or "sm_90" of the current device; "" without one. Its driver's and runtime's versions. */
SD_ORT_API const char* sd_ort_gpu_arch(void);
SD_ORT_API const char* sd_ort_gpu_versions(void);

/* Makes the memset nodes of a captured graph that is not instantiated yet (a cudaGraph_t), which BLAS libraries leave
 * there, kernels: each cost the device 3 us. Nothing on AMD. Since version 2. */
SD_ORT_API void sd_ort_replace_memsets(void* graph);

/* ---- libsd_ort_ops.so ---- */

/* A line for each GPU execution provider: the library that serves it, or why none does. After RegisterCustomOps. */
SD_ORT_API const char* sd_ort_gpu_status(void);

/* Operators are those of operators.txt that have CPU kernels. The same as sd_ort_find_op, for them. */
SD_ORT_API int sd_ort_cpu_find_op(const char* name, size_t params_size);
/* A thread pool: runs body(context, i) for every i under count and returns when all are done. */
typedef void (*sd_ort_parallel_for)(void* pool, void (*body)(void* context, size_t i), size_t count, void* context);
/* Runs the operator's kernel for this processor; float32 and float16. A null `parallel_for` runs all on this thread. */
SD_ORT_API const char* sd_ort_cpu_run(int op, const void* params, sd_ort_parallel_for parallel_for, void* pool);

#ifdef __cplusplus
}
#endif
