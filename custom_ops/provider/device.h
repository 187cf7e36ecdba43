// Memory, streams, events and captured graphs of the device, the same for every vendor. Plain C++: only device.cc
// includes HIP or CUDA. A failing function throws std::runtime_error with the vendor's message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sd_ort::device {

using Stream = void*;
using Event = void*;
using Graph = void*;

extern const char* const kProvider;  // name of the execution provider: SdOrtHip, SdOrtCuda or SdOrtSimulated
extern const char* const kMemory;    // name of its OrtMemoryInfo
extern const uint32_t kVendorId;     // PCI vendor id; 0x1D05, which no GPU has, for the simulated device
extern const char* const kVendor;    // vendor name of its devices
enum class Copy { kToDevice, kToHost, kOnDevice };

struct Properties {
  std::string name;
  size_t memory;  // bytes
};

int count();  // 0 without a device or a driver
Properties properties(int device);
void use(int device);  // sets the device of the calling thread
struct Memory {
  size_t free, total;  // bytes
};
Memory memory();  // of the current device

void* allocate(size_t bytes) noexcept;  // null if out of memory
void release(void* data) noexcept;
void* allocate_pinned(size_t bytes) noexcept;
void release_pinned(void* data) noexcept;

Stream create_stream();
void destroy_stream(Stream stream) noexcept;
void wait(Stream stream);
// Waits for all work queued so far in the default stream and the session streams of the current device, except streams
// that another thread captures. Throws if the calling thread captures one.
void wait_for_all();
void wait_for_all_in_stream(Stream stream);  // queues that wait in `stream`
// Counts the sessions of a device that use this stream.
void add_session_stream(int device, Stream stream);
void remove_session_stream(int device, Stream stream) noexcept;
bool is_capturing(Stream stream);  // true until end_capture(), also after the capture was invalidated

void copy(void* to, const void* from, size_t bytes, Copy direction, Stream stream);  // queued in the stream
void copy_now(void* to, const void* from, size_t bytes, Copy direction);             // waits for wait_for_all() first
bool can_access(int device, int peer);  // whether `device` can read and write the memory of `peer` without the host
void enable_access(int peer) noexcept;  // for the current device; without effect if it is enabled already
void copy_to_peer(void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream);

Event create_event(bool timed = false);
void destroy_event(Event event) noexcept;
void record(Event event, Stream stream);
void wait_in_stream(Stream stream, Event event);
void wait_on_host(Event event);
float milliseconds(Event first, Event last);  // between two timed events that have completed

void begin_capture(Stream stream);
Graph end_capture(Stream stream);
void launch(Graph graph, Stream stream);
void destroy_graph(Graph graph) noexcept;

}  // namespace sd_ort::device
