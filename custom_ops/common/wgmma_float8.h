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
// d[64 x 16 kTiles] = a[64 x 32] b[16 kTiles x 32]^T, e4m3, added to d when `add`; kTiles is 8 or 10.
template <int kTiles>
__device__ inline void multiply_float8(mma::Accumulator (&d)[kTiles], uint64_t a, uint64_t b, bool add);

#if defined(SD_ORT_WGMMA)
#define SD_ORT_WGMMA_FLOAT8(columns, registers, a_at, b_at, add_at)                                              \
  template <>                                                                                                    \
  __device__ inline void multiply_float8(mma::Accumulator(&d)[columns / 16], uint64_t a, uint64_t b, bool add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_at                                                \
                 ", 0;\n"                                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" SD_ORT_N##registers          \
                 "}, %" #a_at ", %" #b_at ", add, 1, 1;\n}\n"                                                    \
                 : SD_ORT_D##registers                                                                           \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                  \
  }
SD_ORT_WGMMA_FLOAT8(128, 64, 64, 65, 66)
SD_ORT_WGMMA_FLOAT8(160, 80, 80, 81, 82)
#else
template <int kTiles>
__device__ inline void multiply_float8(mma::Accumulator (&)[kTiles], uint64_t, uint64_t, bool) {}
#endif
#endif

}  // namespace wgmma
}  // namespace sd_ort
#endif
