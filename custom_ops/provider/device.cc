#include "provider/device.h"

#include <map>
#include <stdexcept>

#include "common/capture.h"
#include "common/gpu_graph.h"

namespace sd_ort::device {
namespace {

void check(gpuError_t error, const char* what) {
  if (error == gpuSuccess) return;
  (void)SD_ORT_GPU_NAME(GetLastError)();
  throw std::runtime_error(std::string(what) + ": " + SD_ORT_GPU_NAME(GetErrorString)(error));
}

gpuStream_t of(Stream stream) { return static_cast<gpuStream_t>(stream); }
gpuEvent_t of_event(Event event) { return static_cast<gpuEvent_t>(event); }

auto kind(Copy direction) {
  return direction == Copy::kToDevice ? SD_ORT_GPU_NAME(MemcpyHostToDevice)
         : direction == Copy::kToHost ? SD_ORT_GPU_NAME(MemcpyDeviceToHost)
                                      : SD_ORT_GPU_NAME(MemcpyDeviceToDevice);
}

// Streams of one device that a copy without a stream waits for: the default stream and the session streams.
struct DeviceStreams {
  gpuStream_t copies = nullptr;  // runs the copies without a stream
  gpuEvent_t mark = nullptr;
  std::map<gpuStream_t, int> sessions;  // session streams and how many sessions use each

  // Queues in `stream` a wait for all work queued so far in `other`.
  void follow(gpuStream_t stream, gpuStream_t other) const {
    check(SD_ORT_GPU_NAME(EventRecord)(mark, other), "an event cannot be recorded");
    check(SD_ORT_GPU_NAME(StreamWaitEvent)(stream, mark, 0), "a stream cannot wait for an event");
  }
};

// Streams by device. The caller must hold the lock of Captures.
std::map<int, DeviceStreams>& all_streams() {
  static auto* const all = new std::map<int, DeviceStreams>;  // never deleted, like Captures
  return *all;
}

// Streams of the current device; creates the stream for copies.
DeviceStreams& current_streams() {
  int device = 0;
  check(SD_ORT_GPU_NAME(GetDevice)(&device), "the device cannot be used");
  DeviceStreams& streams = all_streams()[device];
  if (streams.copies == nullptr) streams.copies = of(create_stream());
  if (streams.mark == nullptr) streams.mark = of_event(create_event());
  return streams;
}

// Queues a wait for all work of the device's streams in `stream` (null: the stream for copies) and returns the stream.
// Streams that another thread captures are skipped.
gpuStream_t follow_all(gpuStream_t stream) {
  Captures& captures = Captures::instance();
  const auto lock = captures.lock();
  const DeviceStreams& streams = current_streams();
  if (stream == nullptr) stream = streams.copies;
  streams.follow(stream, nullptr);
  if (stream != streams.copies) streams.follow(stream, streams.copies);
  for (const auto& [session, count] : streams.sessions) {
    if (session == nullptr || session == stream || captures.is_captured_elsewhere(session)) continue;
    if (is_capturing(session)) throw std::runtime_error("a copy outside of the captured stream cannot be captured");
    streams.follow(stream, session);
  }
  return stream;
}

}  // namespace

const char* const kProvider = gpuProviderName;
const char* const kMemory = gpuProviderName;
const uint32_t kVendorId = gpuVendorId;
const char* const kVendor = gpuVendorName;

int count() {
  int devices = 0;
  const bool found = SD_ORT_GPU_NAME(GetDeviceCount)(&devices) == gpuSuccess;
  (void)SD_ORT_GPU_NAME(GetLastError)();
  return found ? devices : 0;
}

Properties properties(int device) {
  gpuDeviceProp_t found;
  check(SD_ORT_GPU_NAME(GetDeviceProperties)(&found, device), "the device's properties cannot be read");
  return {found.name, found.totalGlobalMem};
}

void use(int device) { check(SD_ORT_GPU_NAME(SetDevice)(device), "the device cannot be used"); }

Memory memory() {
  Memory found{};
  check(SD_ORT_GPU_NAME(MemGetInfo)(&found.free, &found.total), "the device's free memory cannot be read");
  return found;
}

void* allocate(size_t bytes) noexcept {
  void* data = nullptr;
  if (SD_ORT_GPU_NAME(Malloc)(&data, bytes) == gpuSuccess) return data;
  (void)SD_ORT_GPU_NAME(GetLastError)();
  return nullptr;
}

void release(void* data) noexcept { (void)SD_ORT_GPU_NAME(Free)(data); }

void* allocate_pinned(size_t bytes) noexcept {
  void* data = nullptr;
  if (gpuMallocPinned(&data, bytes) == gpuSuccess) return data;
  (void)SD_ORT_GPU_NAME(GetLastError)();
  return nullptr;
}

void release_pinned(void* data) noexcept { (void)gpuFreePinned(data); }

Stream create_stream() {
  gpuStream_t stream = nullptr;
  check(SD_ORT_GPU_NAME(StreamCreateWithFlags)(&stream, SD_ORT_GPU_NAME(StreamNonBlocking)),
        "no stream can be created");
  return stream;
}

void destroy_stream(Stream stream) noexcept { (void)SD_ORT_GPU_NAME(StreamDestroy)(of(stream)); }

void wait(Stream stream) { check(SD_ORT_GPU_NAME(StreamSynchronize)(of(stream)), "the device failed"); }

void wait_for_all() { wait(follow_all(nullptr)); }

void wait_for_all_in_stream(Stream stream) { (void)follow_all(of(stream)); }

void add_session_stream(int device, Stream stream) {
  const auto lock = Captures::instance().lock();
  ++all_streams()[device].sessions[of(stream)];
}

void remove_session_stream(int device, Stream stream) noexcept {
  Captures& captures = Captures::instance();
  const auto lock = captures.lock();
  auto& sessions = all_streams()[device].sessions;
  if (--sessions[of(stream)] > 0) return;
  sessions.erase(of(stream));
  if (captures.is_captured_elsewhere(stream)) return;
  int current = device;
  (void)SD_ORT_GPU_NAME(GetDevice)(&current);
  try {  // later copies still wait for the work in this stream
    use(device);
    const DeviceStreams& streams = current_streams();
    if (!is_capturing(stream)) streams.follow(streams.copies, of(stream));
    use(current);
  } catch (const std::runtime_error&) {  // the device is lost, and its work with it
  }
}

bool is_capturing(Stream stream) {
  SD_ORT_GPU_NAME(StreamCaptureStatus) status;
  check(SD_ORT_GPU_NAME(StreamIsCapturing)(of(stream), &status), "the capture status of the stream cannot be read");
  return status != SD_ORT_GPU_NAME(StreamCaptureStatusNone);
}

void copy(void* to, const void* from, size_t bytes, Copy direction, Stream stream) {
  if (bytes == 0 || to == from) return;
  check(SD_ORT_GPU_NAME(MemcpyAsync)(to, from, bytes, kind(direction), of(stream)), "a copy failed");
}

void copy_now(void* to, const void* from, size_t bytes, Copy direction) {
  if (bytes == 0 || to == from) return;
  const gpuStream_t stream = follow_all(nullptr);
  copy(to, from, bytes, direction, stream);
  wait(stream);
}

bool can_access(int device, int peer) {
  int can = 0;
  check(SD_ORT_GPU_NAME(DeviceCanAccessPeer)(&can, device, peer), "the access between devices cannot be read");
  return can != 0;
}

void enable_access(int peer) noexcept {
  (void)SD_ORT_GPU_NAME(DeviceEnablePeerAccess)(peer, 0);
  (void)SD_ORT_GPU_NAME(GetLastError)();  // that it is enabled already
}

void copy_to_peer(void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream) {
  check(SD_ORT_GPU_NAME(MemcpyPeerAsync)(to, to_device, from, from_device, bytes, of(stream)),
        "a copy between devices failed");
}

Event create_event(bool timed) {
  gpuEvent_t event = nullptr;
  const unsigned flags = timed ? 0 : SD_ORT_GPU_NAME(EventDisableTiming);
  check(SD_ORT_GPU_NAME(EventCreateWithFlags)(&event, flags), "no event can be created");
  return event;
}

void destroy_event(Event event) noexcept { (void)SD_ORT_GPU_NAME(EventDestroy)(of_event(event)); }

void record(Event event, Stream stream) {
  check(SD_ORT_GPU_NAME(EventRecord)(of_event(event), of(stream)), "an event cannot be recorded");
}

void wait_in_stream(Stream stream, Event event) {
  check(SD_ORT_GPU_NAME(StreamWaitEvent)(of(stream), of_event(event), 0), "a stream cannot wait for an event");
}

void wait_on_host(Event event) { check(SD_ORT_GPU_NAME(EventSynchronize)(of_event(event)), "the device failed"); }

float milliseconds(Event first, Event last) {
  float found = 0;
  check(SD_ORT_GPU_NAME(EventElapsedTime)(&found, of_event(first), of_event(last)), "two events cannot be compared");
  return found;
}

// Relaxed mode: a kernel library may allocate memory while this thread or another one captures.
void begin_capture(Stream stream) {
  const gpuError_t error = Captures::instance().begin(stream, [&] {
    return SD_ORT_GPU_NAME(StreamBeginCapture)(of(stream), SD_ORT_GPU_NAME(StreamCaptureModeRelaxed));
  });
  check(error, "the stream cannot begin to capture");
}

Graph end_capture(Stream stream) {
  SD_ORT_GPU_NAME(Graph_t) graph = nullptr;
  SD_ORT_GPU_NAME(GraphExec_t) created = nullptr;
  const gpuError_t ended =
      Captures::instance().end(stream, [&] { return SD_ORT_GPU_NAME(StreamEndCapture)(of(stream), &graph); });
  check(ended, "the run could not be captured");
  replace_memsets(graph);
  const gpuError_t error = SD_ORT_GPU_NAME(GraphInstantiateWithFlags)(&created, graph, 0);
  (void)SD_ORT_GPU_NAME(GraphDestroy)(graph);
  check(error, "the captured run cannot be created a graph");
  upload_graph(created, of(stream));
  return created;
}

void launch(Graph graph, Stream stream) {
  check(SD_ORT_GPU_NAME(GraphLaunch)(static_cast<SD_ORT_GPU_NAME(GraphExec_t)>(graph), of(stream)),
        "the captured run cannot be replayed");
}

void destroy_graph(Graph graph) noexcept {
  (void)SD_ORT_GPU_NAME(GraphExecDestroy)(static_cast<SD_ORT_GPU_NAME(GraphExec_t)>(graph));
}

}  // namespace sd_ort::device
