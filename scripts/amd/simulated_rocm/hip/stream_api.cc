// Exported functions of streams, events and graphs, and the interface for other simulated libraries.
#include <memory>

#include "../simulated_hip.h"
#include "call.h"
#include "memory.h"
#include "stream.h"

using namespace simulated;

extern "C" {

hipError_t hipStreamCreate(hipStream_t* stream) {
  return call(__func__, [&] { return create_stream(current_device, hipStreamDefault, 0, stream); });
}

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return call(__func__, [&] { return create_stream(current_device, flags, 0, stream); });
}

hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  return call(__func__, [&] { return create_stream(current_device, flags, priority, stream); });
}

hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call(__func__, [&] {
    if (least != nullptr) *least = 1;
    if (greatest != nullptr) *greatest = -1;
    return hipSuccess;
  });
}

hipError_t hipStreamDestroy(hipStream_t stream) {
  return call(__func__, [&] { return destroy_stream(stream); });
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
  return call(__func__, [&] { return synchronize_stream(stream); });
}

hipError_t hipStreamQuery(hipStream_t stream) {
  return call(__func__, [&] { return synchronize_stream(stream); });
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  return call(__func__, [&] { return wait_event(stream, event, flags); });
}

int hipGetStreamDeviceId(hipStream_t stream) {
  count_call(__func__);
  return stream_device(stream, current_device);
}

hipError_t hipDeviceSynchronize(void) {
  return call(__func__, [&] { return check_device_wait(); });
}

hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t function, void* argument) {
  return call(__func__, [&] {
    if (function == nullptr) return hipErrorInvalidValue;
    NodeParams params;
    params.type = hipGraphNodeTypeHost;
    params.host = {function, argument};
    return submit(stream, [=] { function(argument); }, params);
  });
}

hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  return call(__func__, [&] { return begin_capture(stream, mode); });
}

hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  return call(__func__, [&] { return end_capture(stream, graph); });
}

hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  return call(__func__, [&] { return capture_status(stream, status, nullptr); });
}

hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status, unsigned long long* id) {
  return call(__func__, [&] { return capture_status(stream, status, id); });
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  return call(__func__, [&] { return exchange_capture_mode(mode); });
}

hipError_t hipGraphInstantiate(hipGraphExec_t* executable, hipGraph_t graph, hipGraphNode_t*, char*, size_t) {
  return call(__func__, [&] { return instantiate(graph, executable); });
}

hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable, hipGraph_t graph, unsigned long long) {
  return call(__func__, [&] { return instantiate(graph, executable); });
}

hipError_t hipGraphUpload(hipGraphExec_t, hipStream_t) {
  return call(__func__, [&] { return hipSuccess; });
}

hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t stream) {
  return call(__func__, [&] { return launch_graph(executable, stream); });
}

hipError_t hipGraphDestroy(hipGraph_t graph) {
  return call(__func__, [&] { return destroy_graph(graph); });
}

hipError_t hipGraphExecDestroy(hipGraphExec_t executable) {
  return call(__func__, [&] { return destroy_executable(executable); });
}

hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count) {
  return call(__func__, [&] { return list_nodes(graph, nodes, count); });
}

hipError_t hipGraphNodeGetType(hipGraphNode_t node, hipGraphNodeType* type) {
  return call(__func__, [&] {
    const NodeParams* params = node_params(node);
    if (params == nullptr || type == nullptr) return hipErrorInvalidValue;
    *type = params->type;
    return hipSuccess;
  });
}

hipError_t hipGraphHostNodeGetParams(hipGraphNode_t node, hipHostNodeParams* host) {
  return call(__func__, [&] {
    const NodeParams* params = node_params(node);
    if (params == nullptr || params->type != hipGraphNodeTypeHost || host == nullptr) return hipErrorInvalidValue;
    *host = params->host;
    return hipSuccess;
  });
}

hipError_t hipGraphDestroyNode(hipGraphNode_t node) {
  return call(__func__, [&] { return destroy_node(node); });
}

hipError_t hipEventCreate(hipEvent_t* event) {
  return call(__func__, [&] { return create_event(hipEventDefault, event); });
}

hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  return call(__func__, [&] { return create_event(flags, event); });
}

hipError_t hipEventDestroy(hipEvent_t event) {
  return call(__func__, [&] { return destroy_event(event); });
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return call(__func__, [&] { return record_event(event, stream); });
}

hipError_t hipEventSynchronize(hipEvent_t event) {
  return call(__func__, [&] { return query_event(event); });
}

hipError_t hipEventQuery(hipEvent_t event) {
  return call(__func__, [&] { return query_event(event); });
}

hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t begin, hipEvent_t end) {
  return call(__func__, [&] { return elapsed_time(milliseconds, begin, end); });
}

hipError_t simulated_hip_submit(hipStream_t stream, void (*operation)(void*), void* argument, void (*release)(void*)) {
  return call(__func__, [&] {
    const std::shared_ptr<void> owner(argument, release != nullptr ? release : [](void*) {});
    return submit(stream, [operation, owner] { operation(owner.get()); });
  });
}

hipError_t simulated_hip_copy_of(hipGraphNode_t node, const void** source, size_t* bytes) {
  const NodeParams* params = node_params(node);
  if (params == nullptr || params->type != hipGraphNodeTypeMemcpy) return hipErrorInvalidValue;
  *source = params->source;
  *bytes = params->bytes;
  return hipSuccess;
}

int simulated_hip_is_allocated(const void* address, size_t bytes) { return is_allocated(address, bytes); }

const char* simulated_hip_target(void) { return settings().target.c_str(); }

int simulated_hip_kernels_run(void) { return settings().kernels_run; }

void simulated_hip_count(const char* function) { simulated::count_call(function); }

void simulated_hip_write_report() { simulated::write_report(); }

}  // extern "C"
