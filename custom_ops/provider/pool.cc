#include "provider/pool.h"

#include <algorithm>
#include <iterator>

#include "provider/device.h"

namespace sd_ort {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kPage = 2 << 20;          // granularity of driver allocations
constexpr size_t kSegment = 16 << 20;      // smallest segment; a larger block gets a segment of its own size
constexpr size_t kMinRemainder = 1 << 10;  // smaller remainders are not split off

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

}  // namespace

std::shared_ptr<Pool> Pool::shared(int device, void* stream, size_t limit) {
  static std::mutex mutex;
  static auto* const pools = new std::map<std::pair<int, void*>, std::weak_ptr<Pool>>;  // outlives every session
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Pool>& known = (*pools)[{device, stream}];
  std::shared_ptr<Pool> pool = known.lock();
  if (pool == nullptr) known = pool = std::make_shared<Pool>(device, limit);
  return pool;
}

Pool::~Pool() {
  for (const auto& [address, block] : blocks_) {
    if (block.starts_segment) device::release(address);
  }
}

void* Pool::allocate(size_t bytes) noexcept {
  if (bytes == 0 || bytes > SIZE_MAX - kPage) return nullptr;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes = round_up(bytes, kAlignment);
    void* data = reuse_block(bytes);
    if (data == nullptr && (grow(std::max(bytes, kSegment)) || grow(round_up(bytes, kPage)))) data = reuse_block(bytes);
    return data;
  } catch (...) {  // no host memory for the bookkeeping
    return nullptr;
  }
}

// Returns the smallest free block that is large enough, or null.
void* Pool::reuse_block(size_t bytes) {
  const auto found = free_.lower_bound({bytes, nullptr});
  if (found == free_.end()) return nullptr;
  const auto block = blocks_.find(found->second);
  free_.erase(found);
  split(block, bytes);
  block->second.used = true;
  in_use_ += block->second.bytes;
  peak_in_use_ = std::max(peak_in_use_, in_use_);
  return block->first;
}

void Pool::split(Blocks::iterator block, size_t bytes) {
  const size_t rest = block->second.bytes - bytes;
  if (rest < kMinRemainder) return;
  block->second.bytes = bytes;
  blocks_.emplace(block->first + bytes, Block{rest, false, false});
  free_.insert({rest, block->first + bytes});
}

bool Pool::grow(size_t segment) {
  device::use(device_);
  if (segment > limit_ - std::min(limit_, reserved_)) release_unused_locked();
  if (segment > limit_ - std::min(limit_, reserved_)) return false;
  void* data = device::allocate(segment);
  if (data == nullptr) {
    release_unused_locked();
    data = device::allocate(segment);
  }
  if (data == nullptr) return false;
  reserved_ += segment;
  blocks_.emplace(static_cast<char*>(data), Block{segment, false, true});
  free_.insert({segment, static_cast<char*>(data)});
  return true;
}

void Pool::release(void* data) noexcept {
  if (data == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto block = blocks_.find(static_cast<char*>(data));
  if (block == blocks_.end() || !block->second.used) return;
  in_use_ -= block->second.bytes;
  block->second.used = false;
  if (!block->second.starts_segment && !std::prev(block)->second.used) block = merge(std::prev(block), block);
  const auto next = std::next(block);
  if (next != blocks_.end() && !next->second.starts_segment && !next->second.used) block = merge(block, next);
  free_.insert({block->second.bytes, block->first});
}

// Merges two adjacent free blocks of one segment. Neither is in free_ afterwards.
Pool::Blocks::iterator Pool::merge(Blocks::iterator left, Blocks::iterator right) {
  free_.erase({left->second.bytes, left->first});
  free_.erase({right->second.bytes, right->first});
  left->second.bytes += right->second.bytes;
  blocks_.erase(right);
  return left;
}

void Pool::release_unused() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  release_unused_locked();
}

void Pool::release_unused_locked() {
  if (segments_pinned_) return;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto next = std::next(block);
    const bool is_segment = block->second.starts_segment && (next == blocks_.end() || next->second.starts_segment);
    if (is_segment && !block->second.used) {
      device::release(block->first);
      reserved_ -= block->second.bytes;
      free_.erase({block->second.bytes, block->first});
      blocks_.erase(block);
    }
    block = next;
  }
}

void Pool::pin_segments() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_pinned_ = true;
}

Pool::Statistics Pool::statistics() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {in_use_, peak_in_use_, reserved_, limit_};
}

}  // namespace sd_ort
