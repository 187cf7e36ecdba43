// Registry of the stream captures of the process, so that device synchronization never disturbs them. Plain C++.
//
// HIP rejects device synchronization, and every copy or memset without a stream, in all threads while any stream
// captures in any mode, and invalidates all captures (hip_internal.hpp, 6.4 and 7.2). CUDA rejects most of these.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace sd_ort {

class Captures {
 public:
  // Instance of this library; never deleted, since sessions may outlive its statics.
  static Captures& instance() {
    static Captures* const captures = new Captures;
    return *captures;
  }

  // Calls `begin`, which starts to capture `stream` and returns 0 or an error. Waits while another thread holds the
  // lock.
  template <class Begin>
  auto begin(void* stream, const Begin& begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto result = begin();
    if (result == decltype(result){}) streams_[stream] = std::this_thread::get_id();
    return result;
  }

  // Calls `end`, which ends the capture of `stream`, whether or not one began.
  template <class End>
  auto end(void* stream, const End& end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.erase(stream);
    changed_.notify_all();
    return end();
  }

  // Locks: no capture begins or ends until the result is destroyed.
  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }

  // Whether another thread captures `stream`. The caller must lock the lock.
  bool is_captured_elsewhere(void* stream) const {
    const auto found = streams_.find(stream);
    return found != streams_.end() && found->second != std::this_thread::get_id();
  }

  // Calls `work`, which may synchronize the device, while no other thread captures. The caller must lock no lock that a
  // capture may need. A failed capture may never end: after kTimeout seconds `work` is called anyway.
  template <class Work>
  void run_without(const Work& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(kTimeout), [this] {
      for (const auto& [stream, thread] : streams_) {
        if (thread != std::this_thread::get_id()) return false;
      }
      return true;
    });
    work();
  }

 private:
  static constexpr int kTimeout = 10;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, std::thread::id> streams_;  // capturing streams and the threads that capture them
};

}  // namespace sd_ort
