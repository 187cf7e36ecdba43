#include "provider/upload.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "provider/device.h"

namespace sd_ort {
namespace {

constexpr size_t kPiece = 512 << 10;
constexpr unsigned kMostLanes = 8;

unsigned lane_count() { return std::clamp(std::thread::hardware_concurrency(), 1u, kMostLanes); }

// Has the pages of a mapped file in the page table at once, instead of by a fault for every few of them. Kernels before
// Linux 5.14 refuse, which changes nothing.
void populate([[maybe_unused]] const char* from, [[maybe_unused]] size_t bytes) {
#if defined(MADV_POPULATE_READ)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(from) + bytes - begin, MADV_POPULATE_READ);
#endif
}

}  // namespace

// A tensor on its way, in pieces; lanes draw the pieces' numbers from `next`.
struct Upload::Job {
  int device;
  char* to;
  const char* from;
  size_t bytes;
  std::atomic<size_t> next{0};

  size_t pieces() const { return (bytes + kPiece - 1) / kPiece; }
};

// Two pieces of pinned memory, one on its way while the other is filled, and a thread that is there for the next job
// when it is begun.
class Upload::Lane {
 public:
  Lane() : stream_(device::create_stream()) {
    for (Piece& piece : pieces_) {
      piece.data = device::allocate_pinned(kPiece);
      piece.sent = device::create_event();
    }
  }
  ~Lane() {
    if (thread_.joinable()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
      }
      changed_.notify_all();
      thread_.join();
    }
    for (Piece& piece : pieces_) {
      if (piece.data != nullptr) device::release_pinned(piece.data);
      device::destroy_event(piece.sent);
    }
    device::destroy_stream(stream_);
  }

  bool has_memory() const { return pieces_[0].data != nullptr && pieces_[1].data != nullptr; }

  // Sends pieces in the calling thread until there are no more.
  void send(Job& job) {
    bool first = false;
    int sent = 0;
    for (size_t begin = kPiece * job.next++; begin < job.bytes; begin = kPiece * job.next++, first = !first) {
      Piece& piece = pieces_[first];
      if (sent++ > 1) device::wait_on_host(piece.sent);
      const size_t count = std::min(kPiece, job.bytes - begin);
      populate(job.from + begin, count);
      std::memcpy(piece.data, job.from + begin, count);
      device::copy(job.to + begin, piece.data, count, device::Copy::kToDevice, stream_);
      device::record(piece.sent, stream_);
    }
    if (sent > 0) device::wait(stream_);
  }

  // Sends pieces in the lane's own thread. Where no more threads can be made the other lanes send them.
  void begin(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
    }
    changed_.notify_all();
    if (thread_.joinable()) return;
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error&) {
      job_ = nullptr;
    }
  }

  // Waits for the job that was begun. Returns what went wrong.
  std::exception_ptr finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return job_ == nullptr; });
    return std::exchange(failed_, nullptr);
  }

 private:
  struct Piece {
    void* data = nullptr;
    device::Event sent = nullptr;
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return job_ != nullptr || ends_; });
      if (job_ == nullptr) return;
      lock.unlock();
      std::exception_ptr failed;
      try {
        device::use(job_->device);
        send(*job_);
      } catch (...) {
        failed = std::current_exception();
      }
      lock.lock();
      failed_ = failed;
      job_ = nullptr;
      changed_.notify_all();
    }
  }

  device::Stream stream_;
  Piece pieces_[2];
  std::thread thread_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  Job* job_ = nullptr;
  std::exception_ptr failed_;
  bool ends_ = false;
};

Upload::Upload() = default;
Upload::~Upload() = default;

void Upload::copy(int device, void* to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  device::use(device);
  Lanes& lanes = lanes_[device];
  Job job{device, static_cast<char*>(to), static_cast<const char*>(from), bytes};
  const size_t wanted = std::min<size_t>(lane_count(), job.pieces());
  while (lanes.size() < wanted) {
    lanes.push_back(std::make_unique<Lane>());
    if (lanes.back()->has_memory()) continue;
    lanes.pop_back();
    break;
  }
  if (lanes.empty()) return device::copy_now(to, from, bytes, device::Copy::kToDevice);
  device::wait_for_all();
  const size_t used = std::min(lanes.size(), wanted);
  for (size_t i = 1; i < used; ++i) lanes[i]->begin(job);
  std::exception_ptr failed;
  try {
    lanes[0]->send(job);
  } catch (...) {
    failed = std::current_exception();
  }
  for (size_t i = 1; i < used; ++i) {
    if (const std::exception_ptr other = lanes[i]->finish()) failed = other;
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace sd_ort
