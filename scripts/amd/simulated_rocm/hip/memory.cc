#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "settings.h"

namespace simulated {
namespace {

constexpr size_t kAlignment = 256;

std::mutex mutex;
std::map<uintptr_t, Allocation>& allocations() {
  static auto* map = new std::map<uintptr_t, Allocation>;  // never destroyed: other destructors free memory
  return *map;
}
std::map<int, size_t>& used() {
  static auto* map = new std::map<int, size_t>;
  return *map;
}

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// The allocation around `address`; the caller has the lock.
const Allocation* find(const void* address) {
  const auto key = reinterpret_cast<uintptr_t>(address);
  auto next = allocations().upper_bound(key);
  if (next == allocations().begin()) return nullptr;
  const Allocation& candidate = std::prev(next)->second;
  return key < reinterpret_cast<uintptr_t>(candidate.address) + candidate.bytes ? &candidate : nullptr;
}

enum class Side { kDevice, kAny };

bool is_valid(const char* function, const char* role, const void* address, size_t bytes, Side side) {
  const std::optional<Allocation> allocation = find_allocation(address);
  if (!allocation) {
    if (side != Side::kDevice) return address != nullptr;
    print_message("%s: the %s %p is not device memory.", function, role, address);
    return false;
  }
  const size_t offset = static_cast<const char*>(address) - allocation->address;
  if (bytes <= allocation->bytes - offset) return true;
  print_message("%s: the %s has %zu bytes at offset %zu of an allocation of %zu bytes.", function, role, bytes, offset,
                allocation->bytes);
  return false;
}

}  // namespace

hipError_t allocate(MemoryKind kind, int device, size_t bytes, void** address) {
  if (address == nullptr) return hipErrorInvalidValue;
  *address = nullptr;
  if (bytes == 0) return hipSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  if (kind == MemoryKind::kDevice && (bytes > settings().memory || used()[device] > settings().memory - bytes))
    return hipErrorOutOfMemory;
  const size_t page = sysconf(_SC_PAGESIZE);
  // The memory ends where the guard page begins, so that reads behind it fault; before it are up to a page's bytes.
  const size_t payload = round_up(bytes, kAlignment), mapped = round_up(payload, page);
  const size_t guard = settings().guard_pages ? page : 0;
  void* mapping =
      mmap(nullptr, mapped + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return hipErrorOutOfMemory;
  if (guard != 0) mprotect(static_cast<char*>(mapping) + mapped, guard, PROT_NONE);
  char* begin = static_cast<char*>(mapping) + (guard != 0 ? mapped - payload : 0);
  if (settings().kernels_run) memset(mapping, 0xFF, mapped);  // NaN in all floating point types
  allocations()[reinterpret_cast<uintptr_t>(begin)] = {begin, bytes, kind, device, mapping, mapped + guard};
  if (kind == MemoryKind::kDevice) used()[device] += bytes;
  *address = begin;
  return hipSuccess;
}

hipError_t release(MemoryKind kind, void* address) {
  if (address == nullptr) return hipSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations().find(reinterpret_cast<uintptr_t>(address));
  if (found == allocations().end() || found->second.kind != kind) return hipErrorInvalidValue;
  const Allocation allocation = found->second;
  allocations().erase(found);
  if (kind == MemoryKind::kDevice) used()[allocation.device] -= allocation.bytes;
  munmap(allocation.mapping, allocation.mapping_bytes);
  return hipSuccess;
}

std::optional<Allocation> find_allocation(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const Allocation* allocation = find(address);
  return allocation == nullptr ? std::nullopt : std::optional<Allocation>(*allocation);
}

bool is_allocated(const void* address, size_t bytes) {
  const std::optional<Allocation> allocation = find_allocation(address);
  return allocation && bytes <= allocation->bytes - (static_cast<const char*>(address) - allocation->address);
}

hipError_t check_copy(const char* function, const void* destination, const void* source, size_t bytes,
                      hipMemcpyKind kind) {
  if (bytes == 0) return hipSuccess;
  if (kind < hipMemcpyHostToHost || kind > hipMemcpyDefault) return hipErrorInvalidMemcpyDirection;
  const bool to_device = kind == hipMemcpyHostToDevice || kind == hipMemcpyDeviceToDevice;
  const bool from_device = kind == hipMemcpyDeviceToHost || kind == hipMemcpyDeviceToDevice;
  const bool valid = is_valid(function, "destination", destination, bytes, to_device ? Side::kDevice : Side::kAny) &&
                     is_valid(function, "source", source, bytes, from_device ? Side::kDevice : Side::kAny);
  return valid ? hipSuccess : hipErrorInvalidValue;
}

hipError_t check_range(const char* function, const void* address, size_t bytes) {
  if (bytes == 0) return hipSuccess;
  return is_valid(function, "destination", address, bytes, Side::kDevice) ? hipSuccess : hipErrorInvalidValue;
}

size_t free_memory(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return settings().memory - used()[device];
}

}  // namespace simulated
