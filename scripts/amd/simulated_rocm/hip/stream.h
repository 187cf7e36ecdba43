// Streams, events, stream capture and graphs of the simulated devices.
//
// An operation runs in the call that submits it, on the caller's thread: in order of submission, over all streams of
// a process. The rules of stream capture are those of clr 6.4.3.
#pragma once

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include <functional>
#include <vector>

namespace simulated {

using Operation = std::function<void()>;

hipError_t create_stream(int device, unsigned flags, int priority, hipStream_t* stream);
hipError_t destroy_stream(hipStream_t stream);
// Device of a stream; of the null stream `current`. -1 for an invalid stream.
int stream_device(hipStream_t stream, int current);

// What the functions of graphs say of a captured operation.
struct NodeParams {
  hipGraphNodeType type = hipGraphNodeTypeKernel;
  hipHostNodeParams host{};
  const void* source = nullptr;  // of a copy from the host
  size_t bytes = 0;
};

// Runs an operation, or records it if the stream captures.
hipError_t submit(hipStream_t stream, Operation operation, const NodeParams& params = {});

hipError_t synchronize_stream(hipStream_t stream);
// The check of hipDeviceSynchronize: fails and invalidates all captures of the process if any stream captures.
hipError_t check_device_wait();
// The check of hipMemcpy, hipMemset and their like, as check_device_wait with another error.
hipError_t check_implicit_wait();
// The check of hipMalloc, hipFree and their like: depends on the capture modes of the thread and of the streams.
hipError_t check_unsafe_call();
// Exchanges the capture mode of the calling thread, which check_unsafe_call asks.
hipError_t exchange_capture_mode(hipStreamCaptureMode* mode);

hipError_t begin_capture(hipStream_t stream, hipStreamCaptureMode mode);
hipError_t end_capture(hipStream_t stream, hipGraph_t* graph);
hipError_t capture_status(hipStream_t stream, hipStreamCaptureStatus* status, unsigned long long* id);

hipError_t instantiate(hipGraph_t graph, hipGraphExec_t* executable);
hipError_t launch_graph(hipGraphExec_t executable, hipStream_t stream);
hipError_t destroy_graph(hipGraph_t graph);
hipError_t destroy_executable(hipGraphExec_t executable);
// As hipGraphGetNodes: without `nodes` only their number.
hipError_t list_nodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count);
// The parameters of a node of a graph that is not destroyed; null for another handle.
const NodeParams* node_params(hipGraphNode_t node);
hipError_t destroy_node(hipGraphNode_t node);

hipError_t create_event(unsigned flags, hipEvent_t* event);
hipError_t destroy_event(hipEvent_t event);
hipError_t record_event(hipEvent_t event, hipStream_t stream);
hipError_t wait_event(hipStream_t stream, hipEvent_t event, unsigned flags);
// The checks of hipEventSynchronize and hipEventQuery; an event that was recorded is always complete.
hipError_t query_event(hipEvent_t event);
hipError_t elapsed_time(float* milliseconds, hipEvent_t begin, hipEvent_t end);

}  // namespace simulated
