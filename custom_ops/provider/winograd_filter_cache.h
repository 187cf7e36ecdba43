// A convolution's filters as NhwcWinograd multiplies by them: made at the first call that gains by it, and kept.
#pragma once

#include <memory>
#include <mutex>

#include "operators/nhwc_conv/op.h"
#include "provider/device.h"
#include "provider/pool.h"

namespace sd_ort {

class KeptFilters {
 public:
  explicit KeptFilters(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~KeptFilters();
  KeptFilters(const KeptFilters&) = delete;
  KeptFilters& operator=(const KeptFilters&) = delete;

  // Those of params.filters, which lie at one address and are written by nobody who does not call `renew`. Null where a
  // quarter of the device's memory is not free, or its use is limited, and while the stream is captured before any
  // call.
  const void* of(const NhwcConvParams& params, device::Stream stream);

  // Makes those of the filters at this address again, in their place, so that captured graphs stay valid: weights that
  // lie in memory of the host program are written under open sessions (sd_ort/runtime/held.py). Nothing may run
  // meanwhile.
  static void renew(const void* filters);

 private:
  void make(const NhwcConvParams& params, device::Stream stream);
  bool has_room() const;

  std::shared_ptr<Pool> pool_;
  std::mutex mutex_;
  void* made_ = nullptr;
  bool is_refused_ = false;
};

}  // namespace sd_ort
