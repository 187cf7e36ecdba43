// The device as the provider sees it: memory, streams, events and captured graphs, the same for every vendor. Plain
// C++: device.cc alone includes HIP or CUDA. What fails throws std::runtime_error with the vendor's message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sd_ort::device {

using Stream = void*;
using Event = void*;
using Graph = void*;

extern const char* const kProvider;  // the execution provider's name: SdOrtHip, SdOrtCuda, SdOrtSimulated
extern const char* const kMemory;    // the name of its memory
extern const uint32_t kVendorId;     // PCI vendor id; 0x1D05, which no GPU has, for the host
extern const char* const kVendor;    // and its name
enum class Copy { kToDevice, kToHost, kOnDevice };

struct Properties {
  std::string name;
  size_t memory;  // bytes
};

int count();  // 0 where there is no device or no driver
Properties properties(int device);
void use(int device);  // for the calling thread
struct Memory {
  size_t free, total;  // bytes
};
Memory memory();  // of the device in use

void* allocate(size_t bytes) noexcept;  // null when there is no more
void release(void* data) noexcept;
void* allocate_pinned(size_t bytes) noexcept;
void release_pinned(void* data) noexcept;

Stream create_stream();
void destroy_stream(Stream stream) noexcept;
void wait(Stream stream);
// For all that is queued by now in the device's streams: the default one and those of sessions, except streams that
// another thread captures. Throws if the calling thread captures one.
void wait_for_all();
void wait_for_all_in_stream(Stream stream);  // the same as a wait that is queued in a stream
// Counts the sessions whose stream this is, of a device.
void add_session_stream(int device, Stream stream);
void remove_session_stream(int device, Stream stream) noexcept;
bool is_capturing(Stream stream);  // also in vain: until end_capture

void copy(void* to, const void* from, size_t bytes, Copy direction, Stream stream);  // ordered in the stream
void copy_now(void* to, const void* from, size_t bytes, Copy direction);             // after wait_for_all

Event create_event(bool timed = false);
void destroy_event(Event event) noexcept;
void record(Event event, Stream stream);
void wait_in_stream(Stream stream, Event event);
void wait_on_host(Event event);
float milliseconds(Event first, Event last);  // between two timed events, both past

void begin_capture(Stream stream);
Graph end_capture(Stream stream);
void launch(Graph graph, Stream stream);
void destroy_graph(Graph graph) noexcept;

}  // namespace sd_ort::device
