// Cache of one convolution's Winograd-transformed filters, computed at the first call that uses NhwcWinograd.
#pragma once

#include <memory>
#include <mutex>

#include "operators/nhwc_conv/op.h"
#include "provider/device.h"
#include "provider/pool.h"

namespace sd_ort {

class WinogradFilterCache {
 public:
  explicit WinogradFilterCache(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~WinogradFilterCache();
  WinogradFilterCache(const WinogradFilterCache&) = delete;
  WinogradFilterCache& operator=(const WinogradFilterCache&) = delete;

  // Returns the transformed params.filters, whose address must not change. Returns null if at most a quarter of device
  // memory is free, if memory_limit is set, or if the first call is being captured.
  const void* get(const NhwcConvParams& params, device::Stream stream);

  // Transforms the filters at this address again into the same memory, so captured graphs stay valid. Called after a
  // weight of an open session was updated in place (sd_ort/runtime/updatable_weights.py). No run may be in progress.
  static void update(const void* filters);

 private:
  void create(const NhwcConvParams& params, device::Stream stream);
  bool has_free_memory() const;

  std::shared_ptr<Pool> pool_;
  std::mutex mutex_;
  void* filters_ = nullptr;
  bool is_disabled_ = false;
};

}  // namespace sd_ort
