#include "provider/staged_copy.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace sd_ort {
namespace {

constexpr unsigned kMostLanes = 8;  // more are not faster: 18 GB/s with 8, 19 with 16 (H200, PCIe 5)

}  // namespace

Lane::Lane() : stream_(device::create_stream()) {
  for (Piece& piece : pieces_) {
    piece.data = device::allocate_pinned(Job::kPiece);
    piece.sent = device::create_event();
  }
}

Lane::~Lane() {
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

void Lane::send(Job& job) {
  bool first = false;
  int sent = 0;
  for (size_t begin = Job::kPiece * job.next++; begin < job.bytes; begin = Job::kPiece * job.next++, first = !first) {
    Piece& piece = pieces_[first];
    if (sent++ > 1) device::wait_on_host(piece.sent);
    const size_t count = std::min(Job::kPiece, job.bytes - begin);
    job.fill(static_cast<char*>(piece.data), begin, count);
    device::copy(job.to + begin, piece.data, count, device::Copy::kToDevice, stream_);
    device::record(piece.sent, stream_);
  }
  if (sent > 0) device::wait(stream_);
}

void Lane::begin(Job& job) {
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

std::exception_ptr Lane::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return job_ == nullptr; });
  return std::exchange(failed_, nullptr);
}

void Lane::serve() {
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

void open_lanes(Lanes& lanes, const Job& job) {
  const size_t most = std::clamp(std::thread::hardware_concurrency(), 1u, kMostLanes);
  while (lanes.size() < std::min(most, job.pieces())) {
    lanes.push_back(std::make_unique<Lane>());
    if (lanes.back()->has_memory()) continue;
    lanes.pop_back();
    return;
  }
}

void send(Lanes& lanes, Job& job) {
  const size_t used = std::min(lanes.size(), job.pieces());
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
