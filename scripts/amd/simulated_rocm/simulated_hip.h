// Interface of the simulated HIP runtime for the simulated ROCm libraries beside it (hipBLASLt, MIOpen, ...).
#pragma once

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs operation(argument) on the host in the order of `stream`. Addresses of device memory are host addresses.
//
// If the stream captures, the operation becomes a node of its graph and runs once in each launch of that graph.
// `release` (may be null) is called once with `argument`, when no further call of `operation` can follow: after the
// call, or when the graph and its last executable are destroyed. It is also called if this function fails.
hipError_t simulated_hip_submit(hipStream_t stream, void (*operation)(void*), void* argument, void (*release)(void*));

// Returns 1 if [address, address + bytes) lies in one allocation of device or pinned host memory, else 0.
int simulated_hip_is_allocated(const void* address, size_t bytes);

// Source (null unless it is host memory) and bytes of a captured copy. Fails for a node that is no copy.
hipError_t simulated_hip_copy_of(hipGraphNode_t node, const void** source, size_t* bytes);

// Target of the simulated devices without features, for example "gfx942".
const char* simulated_hip_target(void);

// 1 if kernels run, 0 if they do nothing (`simulate --kernels skip`): libraries then do not compute either.
int simulated_hip_kernels_run(void);

// Counts a call of `function` in the report. `function` must stay valid.
void simulated_hip_count(const char* function);

// Writes the report of what this process has done so far, which is written at its end too.
void simulated_hip_write_report(void);

#ifdef __cplusplus
}
#endif
