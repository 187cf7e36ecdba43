// Caching allocator of device memory: blocks are cut from larger segments and reused. All work of a session is in one
// stream, so a released block may be reused at once: earlier kernels finish reading it before later kernels write it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace sd_ort {

class Pool {
 public:
  Pool(int device, size_t limit) : device_(device), limit_(limit) {}
  // Returns the pool of the sessions on `stream` that share one, with the limit of the first of them.
  static std::shared_ptr<Pool> shared(int device, void* stream, size_t limit);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns device memory aligned to 256 bytes; null if out of memory or for 0 bytes.
  void* allocate(size_t bytes) noexcept;
  void release(void* data) noexcept;

  // Frees unused segments, unless pin_segments() was called.
  void release_unused() noexcept;
  // Keeps all segments from now on, since a captured graph refers to their addresses.
  void pin_segments() noexcept;

  int device() const { return device_; }

  struct Statistics {
    size_t in_use, peak_in_use, reserved, limit;
  };
  Statistics statistics() const noexcept;

 private:
  struct Block {
    size_t bytes;
    bool used;
    bool starts_segment;
  };
  using Blocks = std::map<char*, Block>;  // by address; the blocks of a segment are contiguous

  void* reuse_block(size_t bytes);
  bool grow(size_t segment);
  void release_unused_locked();
  void split(Blocks::iterator block, size_t bytes);
  Blocks::iterator merge(Blocks::iterator left, Blocks::iterator right);

  const int device_;
  const size_t limit_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::set<std::pair<size_t, char*>> free_;  // by size, then address
  size_t in_use_ = 0, peak_in_use_ = 0, reserved_ = 0;
  bool segments_pinned_ = false;
};

}  // namespace sd_ort
