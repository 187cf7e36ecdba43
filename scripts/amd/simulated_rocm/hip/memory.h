// Device and pinned host memory of the simulated devices: ranges of host memory with their bounds.
#pragma once

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include <cstddef>
#include <optional>

namespace simulated {

enum class MemoryKind { kDevice, kPinned };

struct Allocation {
  char* address;
  size_t bytes;
  MemoryKind kind;
  int device;
  void* mapping;  // what mmap returned, with guard pages
  size_t mapping_bytes;
};

// Allocates `bytes` of 0xFF, 256-byte aligned; null for 0 bytes. Device memory counts against the device's size.
hipError_t allocate(MemoryKind kind, int device, size_t bytes, void** address);

// Releases an allocation by its first address. hipErrorInvalidValue for any other address; null is allowed.
hipError_t release(MemoryKind kind, void* address);

// The allocation that contains `address`, if there is one.
std::optional<Allocation> find_allocation(const void* address);

// Whether [address, address + bytes) is in one allocation.
bool is_allocated(const void* address, size_t bytes);

// Whether a copy may use these ranges: a range that begins in an allocation ends in it, and the sides of a copy that
// `kind` places on the device are allocations. Prints a message and returns hipErrorInvalidValue if not.
hipError_t check_copy(const char* function, const void* destination, const void* source, size_t bytes,
                      hipMemcpyKind kind);

// As check_copy, for memory that is written by the device: hipMemset.
hipError_t check_range(const char* function, const void* address, size_t bytes);

size_t free_memory(int device);

}  // namespace simulated
