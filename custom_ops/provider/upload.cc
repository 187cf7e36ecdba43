#include "provider/upload.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <system_error>
#include <thread>

namespace sd_ort {
namespace {

constexpr size_t kPiece = 1 << 20;
constexpr unsigned kMostThreads = 4;

unsigned thread_count() { return std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads); }

}  // namespace

class Upload::Lane {
 public:
  Lane() : stream_(device::create_stream()) {
    for (Piece& piece : pieces_) {
      piece.data = device::allocate_pinned(kPiece);
      piece.sent = device::create_event();
    }
  }
  ~Lane() {
    for (Piece& piece : pieces_) {
      if (piece.data != nullptr) device::release_pinned(piece.data);
      device::destroy_event(piece.sent);
    }
    device::destroy_stream(stream_);
  }

  bool has_memory() const { return pieces_[0].data != nullptr && pieces_[1].data != nullptr; }

  // Sends those pieces of `bytes` whose numbers it draws from `next`.
  void send(char* to, const char* from, size_t bytes, std::atomic<size_t>& next) {
    bool first = false;
    int sent = 0;
    for (size_t begin = kPiece * next++; begin < bytes; begin = kPiece * next++, first = !first) {
      Piece& piece = pieces_[first];
      if (sent++ > 1) device::wait_on_host(piece.sent);
      const size_t count = std::min(kPiece, bytes - begin);
      std::memcpy(piece.data, from + begin, count);
      device::copy(to + begin, piece.data, count, device::Copy::kToDevice, stream_);
      device::record(piece.sent, stream_);
    }
    device::wait(stream_);
  }

 private:
  struct Piece {
    void* data = nullptr;
    device::Event sent = nullptr;
  };

  device::Stream stream_;
  Piece pieces_[2];
};

Upload::Upload() = default;
Upload::~Upload() = default;

void Upload::copy(int device, void* to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  device::use(device);
  Lanes& lanes = lanes_[device];
  while (lanes.size() < thread_count()) {
    lanes.push_back(std::make_unique<Lane>());
    if (lanes.back()->has_memory()) continue;
    lanes.pop_back();
    break;
  }
  if (lanes.empty()) return device::copy_now(to, from, bytes, device::Copy::kToDevice);
  device::wait_for_all();
  std::atomic<size_t> next{0};
  std::exception_ptr failed;
  std::mutex failing;
  const auto send = [&](Lane& lane) {
    try {
      device::use(device);
      lane.send(static_cast<char*>(to), static_cast<const char*>(from), bytes, next);
    } catch (...) {
      const std::lock_guard<std::mutex> one(failing);
      failed = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(lanes.size());
  try {
    for (size_t i = 1; i < lanes.size(); ++i) threads.emplace_back(send, std::ref(*lanes[i]));
  } catch (const std::system_error&) {  // no more threads: those that there are do it
  }
  send(*lanes[0]);
  for (std::thread& thread : threads) thread.join();
  if (failed) std::rethrow_exception(failed);
}

}  // namespace sd_ort
