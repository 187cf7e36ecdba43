// Captures of the process's streams as graphs, so that nothing waits for a device that captures. Plain C++.
//
// HIP refuses every wait for a device, and every copy or memset without a stream, in all threads while any stream
// captures in any mode, and invalidates all captures (hip_internal.hpp, 6.4 and 7.2). CUDA refuses most of these.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace sd_ort {

class Captures {
 public:
  // The captures of this library; never deleted: sessions may be closed after its statics are.
  static Captures& instance() {
    static Captures* const captures = new Captures;
    return *captures;
  }

  // Calls `begin`, which begins to capture `stream` and returns 0, or an error, while nobody has hold().
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

  // Until the result is destroyed, no capture begins or ends.
  std::unique_lock<std::mutex> hold() { return std::unique_lock<std::mutex>(mutex_); }

  // Whether a thread other than the calling one captures `stream`. The caller has hold().
  bool is_captured_elsewhere(void* stream) const {
    const auto found = streams_.find(stream);
    return found != streams_.end() && found->second != std::this_thread::get_id();
  }

  // Calls `work`, which waits for a device or may do so, while no other thread captures. The caller has no lock that a
  // capture may need. A capture that failed halfway may never end: after kPatience seconds `work` is called anyway.
  template <class Work>
  void run_without(const Work& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(kPatience), [this] {
      for (const auto& [stream, thread] : streams_) {
        if (thread != std::this_thread::get_id()) return false;
      }
      return true;
    });
    work();
  }

 private:
  static constexpr int kPatience = 10;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, std::thread::id> streams_;  // those that capture, and the thread that began it
};

}  // namespace sd_ort
