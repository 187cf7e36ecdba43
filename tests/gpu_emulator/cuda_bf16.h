// Stands in for CUDA's header when a kernel is emulated.
#pragma once

#include "emulator.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
