// CUDA's tensor maps as bulk_copy.h uses them, without the header of the driver's API. Plain C++.
#pragma once

#include <cstdint>

namespace sd_ort {
namespace bulk {

// A matrix of 2-byte elements in global memory and the tile that is copied of it: CUtensorMap, which CUDA 13 aligns to
// 128 bytes (its functions ask for 64, as CUDA 12). A kernel's parameter,
// __grid_constant__.
struct alignas(128) Matrix {
  unsigned char bytes[128];
};

// cuTensorMapEncodeTiled.
using EncodeTiled = int (*)(Matrix*, int type, uint32_t axes, void* data, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* tile, const uint32_t* steps, int interleave,
                            int swizzle, int promotion, int fill);

// CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
constexpr int kUint16 = 1, kNoInterleave = 0, kSwizzle128 = 3, kPromote128Bytes = 2, kZeros = 0;

}  // namespace bulk
}  // namespace sd_ort
