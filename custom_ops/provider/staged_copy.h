// Copies host memory to the device through pinned staging buffers of 1 MiB. Each copier has two and fills one while the
// other is in flight; several copiers in threads share one job.
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

// A copy of `bytes` to device memory `to` in chunks. Copiers take the chunks in order; `fill` writes one to host
// memory.
struct CopyJob {
  static constexpr size_t kChunkBytes = 1 << 20;

  CopyJob(int device, void* to, size_t bytes, std::function<void(char* buffer, size_t begin, size_t count)> fill)
      : device(device), to(static_cast<char*>(to)), bytes(bytes), fill(std::move(fill)) {}
  size_t chunks() const { return (bytes + kChunkBytes - 1) / kChunkBytes; }

  const int device;
  char* const to;
  const size_t bytes;
  const std::function<void(char* buffer, size_t begin, size_t count)> fill;  // called by several threads
  std::atomic<size_t> next{0};
};

// A stream with two staging buffers, and a thread of its own after start().
class StagedCopier {
 public:
  StagedCopier();  // on the current device
  ~StagedCopier();
  StagedCopier(const StagedCopier&) = delete;
  StagedCopier& operator=(const StagedCopier&) = delete;

  bool has_memory() const { return buffers_[0].data != nullptr && buffers_[1].data != nullptr; }

  // Copies chunks in the calling thread until none remains, and waits until its chunks have arrived.
  void copy(CopyJob& job);

  // Runs copy() in the copier's thread, which stays alive. Does nothing if no thread can be created.
  void start(CopyJob& job);
  std::exception_ptr finish();  // waits for the job of start(); returns its error or null

 private:
  struct StagingBuffer {
    void* data = nullptr;
    device::Event copied = nullptr;
  };

  void run_jobs();

  device::Stream stream_;
  StagingBuffer buffers_[2];
  std::thread thread_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  CopyJob* job_ = nullptr;
  std::exception_ptr error_;
  bool stopping_ = false;
};

using StagedCopiers = std::vector<std::unique_ptr<StagedCopier>>;

// Adds copiers up to the number that the job can use; fewer if pinned memory runs out.
void add_copiers(StagedCopiers& copiers, const CopyJob& job);

// Runs a job on the copiers (at least one), the first in the calling thread. Rethrows an error of any of them.
void copy_staged(StagedCopiers& copiers, CopyJob& job);

}  // namespace sd_ort
