// Device memory in blocks cut from larger segments and handed out again. A session's work is in one stream, so a block
// that is free to the host may be given away at once: what still reads it runs before what writes it next.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace sd_ort {

class Pool {
 public:
  Pool(int device, size_t limit) : device_(device), limit_(limit) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // `bytes` of device memory at a multiple of 256; null where there is no more, or for 0 bytes.
  void* allocate(size_t bytes) noexcept;
  void release(void* data) noexcept;

  // Gives segments back that nothing uses; none once keep_all() was called.
  void shrink() noexcept;
  // From now on no segment is given back: a captured graph has its addresses in it.
  void keep_all() noexcept;

  int device() const { return device_; }

  struct Statistics {
    size_t in_use, most_in_use, reserved, limit;
  };
  Statistics statistics() const noexcept;

 private:
  struct Block {
    size_t bytes;
    bool used;
    bool starts_segment;
  };
  using Blocks = std::map<char*, Block>;  // by address; the blocks of a segment lie without gaps

  void* take(size_t bytes);
  bool grow(size_t segment);
  void shrink_locked();
  void split(Blocks::iterator block, size_t bytes);
  Blocks::iterator merge(Blocks::iterator left, Blocks::iterator right);

  const int device_;
  const size_t limit_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::set<std::pair<size_t, char*>> free_;  // by size, then address
  size_t in_use_ = 0, most_in_use_ = 0, reserved_ = 0;
  bool keeps_all_ = false;
};

}  // namespace sd_ort
