// Warpgroup matrix instructions of NVIDIA GPUs for float8 (sm_90a). Layouts are those of wgmma.h; a row of 128 bytes
// has 128 elements, and an instruction multiplies 32 of them. Both operands are K-major, as float8 requires. Sums of an
// instruction have fewer bits than float32. Device code.
#pragma once

#include "common/wgmma.h"

#if SD_ORT_HAS_WARPGROUPS
namespace sd_ort {
namespace wgmma {

constexpr int kFloat8Depth = 32;  // of an instruction

#if !defined(SD_ORT_EMULATED)
// d[64 x 128] = a[64 x 32] b[128 x 32]^T, e4m3, added to d when `add`.
__device__ inline void multiply_float8(mma::Accumulator (&d)[8], uint64_t a, uint64_t b, bool add) {
#if defined(SD_ORT_WGMMA)
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SD_ORT_N64 "}, %64, %65, add, 1, 1;\n}\n"
      : SD_ORT_D64
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
#endif

}  // namespace wgmma
}  // namespace sd_ort
#endif
