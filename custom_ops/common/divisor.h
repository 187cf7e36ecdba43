// Division by a number that the host knows, for kernels.
#pragma once

#include "common/gpu.h"

namespace sd_ort {

// i / divisor by a multiplication, for i below 2^31 (Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication", 1994): with 2^shift the power of two not below the divisor, (i * multiplier / 2^32 + i) / 2^shift.
class Divisor {
 public:
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor) / divisor + 1);
  }
  SD_ORT_DEVICE uint32_t divide(uint32_t i) const {
    return (static_cast<uint32_t>(static_cast<uint64_t>(i) * multiplier_ >> 32) + i) >> shift_;
  }
  // i modulo the divisor, of which `quotient` is i / divisor.
  SD_ORT_DEVICE uint32_t remainder(uint32_t i, uint32_t quotient) const { return i - quotient * divisor_; }

 private:
  uint32_t divisor_, multiplier_, shift_ = 0;
};

}  // namespace sd_ort
