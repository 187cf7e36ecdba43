// A way of bytes to the device: a stream, and pinned memory through which they go, a piece on its way while the next
// one is filled. Several lanes share a job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "provider/device.h"

namespace sd_ort {

// Bytes on their way to `to`, in pieces, whose numbers lanes draw.
struct Job {
  static constexpr size_t kPiece = 1 << 20;

  Job(int device, void* to, size_t bytes, std::function<void(char* piece, size_t begin, size_t count)> fill)
      : device(device), to(static_cast<char*>(to)), bytes(bytes), fill(std::move(fill)) {}
  size_t pieces() const { return (bytes + kPiece - 1) / kPiece; }

  const int device;
  char* const to;
  const size_t bytes;
  const std::function<void(char* piece, size_t begin, size_t count)> fill;  // called by several threads
  std::atomic<size_t> next{0};
};

class Lane {
 public:
  Lane();  // on the current device
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  bool has_memory() const { return pieces_[0].data != nullptr && pieces_[1].data != nullptr; }

  // Sends pieces in the calling thread until there are no more, and waits for its own.
  void send(Job& job);

  // The same in the lane's own thread, which stays. Where no more threads can be made other lanes have to send all.
  void begin(Job& job);
  std::exception_ptr finish();  // what went wrong

 private:
  struct Piece {
    void* data = nullptr;
    device::Event sent = nullptr;
  };

  void serve();

  device::Stream stream_;
  Piece pieces_[2];
  std::thread thread_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  Job* job_ = nullptr;
  std::exception_ptr failed_;
  bool ends_ = false;
};

using Lanes = std::vector<std::unique_ptr<Lane>>;

// Has as many lanes there as are of use for a job, or fewer where there is no more pinned memory.
void open_lanes(Lanes& lanes, const Job& job);

// Sends a job, the first lane in the calling thread. Throws what went wrong. There is a lane.
void send(Lanes& lanes, Job& job);

}  // namespace sd_ort
