#include "stream.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_set>

#include "settings.h"

namespace simulated {
namespace {

using Clock = std::chrono::steady_clock;

struct Node {
  Operation operation;
  NodeParams params;
};
using Nodes = std::vector<std::shared_ptr<Node>>;

// A graph, or an executable made of one: operations in the order of capture.
struct Graph {
  Nodes nodes;
};

// One capture: its graph, and the streams that joined it through events.
struct Capture {
  unsigned long long id;
  hipStreamCaptureMode mode;
  Nodes nodes;
  std::set<struct Stream*> streams;
  std::set<struct Stream*> unjoined;  // forked streams with work that the origin does not wait for
};

struct Stream {
  int device;
  std::mutex running;  // held while an operation of the stream runs
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  std::shared_ptr<Capture> capture;
  bool is_origin = false;
};

struct Event {
  bool has_timing;
  bool is_recorded = false;
  Clock::time_point time;
  std::shared_ptr<Capture> capture;  // of the stream that recorded the event, if it captured
  Stream* capture_stream = nullptr;
};

struct State {
  std::recursive_mutex mutex;
  std::unordered_set<Stream*> streams;
  std::unordered_set<Event*> events;
  std::unordered_set<Graph*> graphs, executables;
  std::set<Stream*> capturing;         // in any mode
  std::set<Stream*> global_capturing;  // in mode Global
  unsigned long long captures = 0;
  std::mutex null_stream;
};

State& state() {
  static auto* instance = new State;  // never destroyed: other libraries call at exit
  return *instance;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// Of the calling thread.
thread_local hipStreamCaptureMode thread_mode = hipStreamCaptureModeGlobal;
thread_local std::set<Stream*> thread_capturing;  // not in mode Relaxed

bool is_null(hipStream_t stream) { return stream == nullptr || stream == hipStreamLegacy; }

// The stream of a handle, or null. The caller has the lock.
Stream* find(hipStream_t handle) {
  auto* stream = reinterpret_cast<Stream*>(handle);
  return state().streams.count(stream) != 0 ? stream : nullptr;
}

Event* find(hipEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  return state().events.count(event) != 0 ? event : nullptr;
}

void invalidate(const std::set<Stream*>& streams) {
  for (Stream* stream : streams)
    for (Stream* member : stream->capture->streams) member->status = hipStreamCaptureStatusInvalidated;
}

// Whether a wait for `stream` meets a capture, which it then invalidates.
bool meets_capture(Stream* stream) {
  if (stream->status == hipStreamCaptureStatusActive) {
    invalidate({stream});
    return true;
  }
  if (stream->status == hipStreamCaptureStatusInvalidated) return true;
  if (thread_mode == hipStreamCaptureModeRelaxed) return false;
  if (!state().global_capturing.empty()) {
    invalidate(state().global_capturing);
    return true;
  }
  invalidate(thread_capturing);
  return !thread_capturing.empty();
}

void leave_capture(Stream* stream) {
  stream->status = hipStreamCaptureStatusNone;
  stream->capture.reset();
  stream->is_origin = false;
  state().capturing.erase(stream);
  state().global_capturing.erase(stream);
}

}  // namespace

hipError_t create_stream(int device, unsigned flags, int, hipStream_t* stream) {
  if (stream == nullptr || (flags & ~hipStreamNonBlocking) != 0) return hipErrorInvalidValue;
  auto* made = new Stream;
  made->device = device;
  Lock lock(state().mutex);
  state().streams.insert(made);
  *stream = reinterpret_cast<hipStream_t>(made);
  return hipSuccess;
}

hipError_t destroy_stream(hipStream_t handle) {
  if (handle == nullptr) return hipErrorInvalidHandle;
  if (is_null(handle)) return hipErrorInvalidResourceHandle;
  Lock lock(state().mutex);
  Stream* stream = find(handle);
  if (stream == nullptr) return hipErrorContextIsDestroyed;
  if (stream->capture) {
    const std::shared_ptr<Capture> capture = stream->capture;
    capture->streams.erase(stream);
    capture->unjoined.erase(stream);
  }
  leave_capture(stream);
  thread_capturing.erase(stream);
  state().streams.erase(stream);
  {
    std::lock_guard<std::mutex> idle(stream->running);
  }
  delete stream;
  return hipSuccess;
}

int stream_device(hipStream_t handle, int current) {
  if (is_null(handle) || handle == hipStreamPerThread) return current;
  Lock lock(state().mutex);
  const Stream* stream = find(handle);
  return stream == nullptr ? -1 : stream->device;
}

hipError_t submit(hipStream_t handle, Operation operation, const NodeParams& params) {
  std::mutex* running = &state().null_stream;
  if (!is_null(handle) && handle != hipStreamPerThread) {
    Lock lock(state().mutex);
    Stream* stream = find(handle);
    if (stream == nullptr) return hipErrorContextIsDestroyed;
    if (stream->status == hipStreamCaptureStatusInvalidated) return hipErrorStreamCaptureInvalidated;
    if (stream->status == hipStreamCaptureStatusActive) {
      stream->capture->nodes.push_back(std::make_shared<Node>(Node{std::move(operation), params}));
      if (!stream->is_origin) stream->capture->unjoined.insert(stream);
      return hipSuccess;
    }
    running = &stream->running;
  }
  std::lock_guard<std::mutex> lock(*running);
  operation();
  return hipSuccess;
}

hipError_t synchronize_stream(hipStream_t handle) {
  if (is_null(handle) || handle == hipStreamPerThread) return hipSuccess;
  Lock lock(state().mutex);
  Stream* stream = find(handle);
  if (stream == nullptr) return hipErrorContextIsDestroyed;
  return meets_capture(stream) ? hipErrorStreamCaptureUnsupported : hipSuccess;
}

hipError_t check_device_wait() {
  Lock lock(state().mutex);
  invalidate(state().capturing);
  return state().capturing.empty() ? hipSuccess : hipErrorStreamCaptureUnsupported;
}

hipError_t check_implicit_wait() {
  Lock lock(state().mutex);
  invalidate(state().capturing);
  return state().capturing.empty() ? hipSuccess : hipErrorStreamCaptureImplicit;
}

hipError_t check_unsafe_call() {
  Lock lock(state().mutex);
  if (thread_mode == hipStreamCaptureModeRelaxed) return hipSuccess;
  if (!thread_capturing.empty()) {
    invalidate(thread_capturing);
    return hipErrorStreamCaptureUnsupported;
  }
  if (thread_mode != hipStreamCaptureModeGlobal || state().global_capturing.empty()) return hipSuccess;
  invalidate(state().global_capturing);
  return hipErrorStreamCaptureUnsupported;
}

hipError_t exchange_capture_mode(hipStreamCaptureMode* mode) {
  if (mode == nullptr || *mode < hipStreamCaptureModeGlobal || *mode > hipStreamCaptureModeRelaxed)
    return hipErrorInvalidValue;
  std::swap(thread_mode, *mode);
  return hipSuccess;
}

hipError_t begin_capture(hipStream_t handle, hipStreamCaptureMode mode) {
  if (is_null(handle)) return hipErrorStreamCaptureUnsupported;
  if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed) return hipErrorInvalidValue;
  Lock lock(state().mutex);
  Stream* stream = find(handle);
  if (stream == nullptr) return hipErrorContextIsDestroyed;
  if (stream->status == hipStreamCaptureStatusActive) return hipErrorIllegalState;
  stream->status = hipStreamCaptureStatusActive;
  stream->is_origin = true;
  stream->capture = std::make_shared<Capture>(Capture{++state().captures, mode, {}, {stream}, {}});
  state().capturing.insert(stream);
  if (mode != hipStreamCaptureModeRelaxed) thread_capturing.insert(stream);
  if (mode == hipStreamCaptureModeGlobal) state().global_capturing.insert(stream);
  return hipSuccess;
}

hipError_t end_capture(hipStream_t handle, hipGraph_t* graph) {
  if (graph == nullptr) return hipErrorInvalidValue;
  if (is_null(handle)) return hipErrorIllegalState;
  Lock lock(state().mutex);
  Stream* stream = find(handle);
  if (stream == nullptr) return hipErrorContextIsDestroyed;
  if (stream->status == hipStreamCaptureStatusNone) return hipErrorIllegalState;
  if (!stream->is_origin) return hipErrorStreamCaptureUnmatched;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->mode != hipStreamCaptureModeRelaxed && thread_capturing.erase(stream) == 0)
    return hipErrorStreamCaptureWrongThread;
  const bool is_valid = stream->status == hipStreamCaptureStatusActive, is_joined = capture->unjoined.empty();
  for (Stream* member : capture->streams) leave_capture(member);
  capture->streams.clear();
  *graph = nullptr;
  if (!is_valid) return hipErrorStreamCaptureInvalidated;
  if (!is_joined) return hipErrorStreamCaptureUnjoined;
  auto* made = new Graph{std::move(capture->nodes)};
  state().graphs.insert(made);
  *graph = reinterpret_cast<hipGraph_t>(made);
  return hipSuccess;
}

hipError_t capture_status(hipStream_t handle, hipStreamCaptureStatus* status, unsigned long long* id) {
  if (status == nullptr) return hipErrorInvalidValue;
  Lock lock(state().mutex);
  *status = hipStreamCaptureStatusNone;
  if (is_null(handle) || handle == hipStreamPerThread)
    return state().capturing.empty() ? hipSuccess : hipErrorStreamCaptureImplicit;
  const Stream* stream = find(handle);
  if (stream == nullptr) return hipErrorContextIsDestroyed;
  *status = stream->status;
  if (id != nullptr && stream->capture) *id = stream->capture->id;
  return hipSuccess;
}

hipError_t instantiate(hipGraph_t handle, hipGraphExec_t* executable) {
  if (executable == nullptr) return hipErrorInvalidValue;
  Lock lock(state().mutex);
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (state().graphs.count(graph) == 0) return hipErrorInvalidValue;
  auto* made = new Graph(*graph);
  state().executables.insert(made);
  *executable = reinterpret_cast<hipGraphExec_t>(made);
  return hipSuccess;
}

hipError_t launch_graph(hipGraphExec_t handle, hipStream_t stream) {
  auto* executable = reinterpret_cast<Graph*>(handle);
  {
    Lock lock(state().mutex);
    if (state().executables.count(executable) == 0) return hipErrorInvalidValue;
  }
  // One operation, so that no other thread's work on this stream comes between.
  return submit(stream, [nodes = executable->nodes] {
    for (const auto& node : nodes) node->operation();
  });
}

hipError_t destroy_graph(hipGraph_t handle) {
  Lock lock(state().mutex);
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (state().graphs.erase(graph) == 0) return hipErrorInvalidValue;
  delete graph;
  return hipSuccess;
}

hipError_t destroy_executable(hipGraphExec_t handle) {
  Lock lock(state().mutex);
  auto* executable = reinterpret_cast<Graph*>(handle);
  if (state().executables.erase(executable) == 0) return hipErrorInvalidValue;
  delete executable;
  return hipSuccess;
}

hipError_t list_nodes(hipGraph_t handle, hipGraphNode_t* nodes, size_t* count) {
  Lock lock(state().mutex);
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (count == nullptr || state().graphs.count(graph) == 0) return hipErrorInvalidValue;
  for (size_t i = 0; nodes != nullptr && i < std::min(*count, graph->nodes.size()); ++i)
    nodes[i] = reinterpret_cast<hipGraphNode_t>(graph->nodes[i].get());
  *count = graph->nodes.size();
  return hipSuccess;
}

const NodeParams* node_params(hipGraphNode_t handle) {
  Lock lock(state().mutex);
  for (const Graph* graph : state().graphs)
    for (const auto& node : graph->nodes)
      if (reinterpret_cast<hipGraphNode_t>(node.get()) == handle) return &node->params;
  return nullptr;
}

hipError_t destroy_node(hipGraphNode_t handle) {
  Lock lock(state().mutex);
  for (Graph* graph : state().graphs)
    for (auto node = graph->nodes.begin(); node != graph->nodes.end(); ++node)
      if (reinterpret_cast<hipGraphNode_t>(node->get()) == handle) {
        graph->nodes.erase(node);
        return hipSuccess;
      }
  return hipErrorInvalidValue;
}

hipError_t create_event(unsigned flags, hipEvent_t* event) {
  if (event == nullptr) return hipErrorInvalidValue;
  auto* made = new Event;
  made->has_timing = (flags & hipEventDisableTiming) == 0;
  Lock lock(state().mutex);
  state().events.insert(made);
  *event = reinterpret_cast<hipEvent_t>(made);
  return hipSuccess;
}

hipError_t destroy_event(hipEvent_t handle) {
  Lock lock(state().mutex);
  Event* event = find(handle);
  if (event == nullptr) return hipErrorInvalidHandle;
  state().events.erase(event);
  delete event;
  return hipSuccess;
}

hipError_t record_event(hipEvent_t handle, hipStream_t stream_handle) {
  Lock lock(state().mutex);
  Event* event = find(handle);
  if (event == nullptr) return hipErrorInvalidHandle;
  if (!is_null(stream_handle) && stream_handle != hipStreamPerThread) {
    Stream* stream = find(stream_handle);
    if (stream == nullptr) return hipErrorContextIsDestroyed;
    if (stream->status == hipStreamCaptureStatusInvalidated) return hipErrorStreamCaptureInvalidated;
    if (stream->status == hipStreamCaptureStatusActive) {
      event->capture = stream->capture;
      event->capture_stream = stream;
      return hipSuccess;
    }
  }
  event->capture.reset();
  event->is_recorded = true;
  event->time = Clock::now();
  return hipSuccess;
}

hipError_t wait_event(hipStream_t stream_handle, hipEvent_t handle, unsigned flags) {
  Lock lock(state().mutex);
  Event* event = find(handle);
  if (event == nullptr) return hipErrorInvalidHandle;
  Stream* stream = is_null(stream_handle) || stream_handle == hipStreamPerThread ? nullptr : find(stream_handle);
  if (stream == nullptr && !is_null(stream_handle) && stream_handle != hipStreamPerThread) return hipErrorInvalidHandle;
  const bool is_capturing = event->capture && !event->capture->streams.empty();
  if (!is_capturing) {
    return flags == 0 ? hipSuccess : hipErrorInvalidValue;  // also if the stream captures: not recorded, no error
  }
  if (stream == nullptr) return hipErrorInvalidHandle;
  if (stream->status == hipStreamCaptureStatusNone) {  // a fork: the stream joins the capture
    stream->status = event->capture_stream->status;
    stream->capture = event->capture;
    stream->capture->streams.insert(stream);
    stream->capture->unjoined.insert(stream);
    state().capturing.insert(stream);
    return hipSuccess;
  }
  if (stream->capture != event->capture) return hipErrorStreamCaptureIsolation;
  stream->capture->unjoined.erase(event->capture_stream);
  return hipSuccess;
}

hipError_t query_event(hipEvent_t handle) {
  Lock lock(state().mutex);
  Event* event = find(handle);
  if (event == nullptr) return hipErrorInvalidHandle;
  if (!event->capture || event->capture->streams.empty()) return hipSuccess;
  invalidate({event->capture_stream});
  return hipErrorCapturedEvent;
}

hipError_t elapsed_time(float* milliseconds, hipEvent_t begin_handle, hipEvent_t end_handle) {
  if (milliseconds == nullptr) return hipErrorInvalidValue;
  Lock lock(state().mutex);
  const Event *begin = find(begin_handle), *end = find(end_handle);
  if (begin == nullptr || end == nullptr) return hipErrorInvalidHandle;
  if (!begin->has_timing || !end->has_timing || !begin->is_recorded || !end->is_recorded) return hipErrorInvalidHandle;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return hipSuccess;
}

}  // namespace simulated
