// CUDA tensor maps for bulk_copy.h, without the header of the driver API. Plain C++.
#pragma once

#include <cstdint>

namespace sd_ort {
namespace bulk {

// CUtensorMap of a matrix of 2-byte elements, or of images of bytes, and its tile: a __grid_constant__ kernel
// parameter. CUDA 13 aligns it to 128 bytes; the driver functions of CUDA 12 and 13 require 64.
struct alignas(128) Matrix {
  unsigned char bytes[128];
};

// cuTensorMapEncodeTiled.
using EncodeTiled = int (*)(Matrix*, int type, uint32_t axes, void* data, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* tile, const uint32_t* steps, int interleave,
                            int swizzle, int promotion, int fill);

// CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
constexpr int kUint8 = 0, kUint16 = 1, kNoInterleave = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromote128Bytes = 2,
              kZeros = 0;

}  // namespace bulk
}  // namespace sd_ort
