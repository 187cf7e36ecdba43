// Bulk tensor copies of NVIDIA GPUs (sm_90): one thread copies tiles between a matrix and shared memory in the 128-byte
// swizzle of wgmma.h, and a barrier in shared memory counts the bytes. Tiles are at most 64 columns of 2 bytes wide;
// elements outside the matrix are read as zeros and not written. Device code, except describe(). Sources: NVIDIA PTX
// ISA, "cp.async.bulk.tensor" and "mbarrier"; CUDA Driver API, "Tensor Map Object Management".
#pragma once

#include "common/tensor_map.h"
#include "common/wgmma.h"

#if SD_ORT_HAS_WARPGROUPS
#if defined(SD_ORT_EMULATED)
#include "bulk_copies.h"  // tests/gpu_emulator: the same functions as below, in software
#else
namespace sd_ort {
namespace bulk {

// Barriers are 8 bytes of shared memory at an address from wgmma::address_of. A phase ends when `arrivals` threads have
// arrived and all expected bytes have been copied; phases are numbered by parity, starting at 0.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
#if defined(SD_ORT_WGMMA)
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
#endif
}
// Makes initialized barriers visible to the copy engine, and to the block after its next barrier.
__device__ inline void publish_barriers() {
#if defined(SD_ORT_WGMMA)
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ inline void arrive_expect_bytes(uint32_t barrier, int bytes) {
#if defined(SD_ORT_WGMMA)
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Orders memory accesses within the block only. An order with other blocks would wait for all its global stores, about
// 1000 cycles.
__device__ inline void arrive(uint32_t barrier) {
#if defined(SD_ORT_WGMMA)
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Waits until the phase of this parity has ended; returns at once for the parity before the first phase.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
#if defined(SD_ORT_WGMMA)
  asm volatile(
      "{\n.reg .pred ended;\nagain: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@!ended bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies the tile at (row, column) to shared memory address `to` and counts its bytes on `barrier`.
__device__ inline void load(uint32_t to, const Matrix& matrix, int row, int column, uint32_t barrier) {
#if defined(SD_ORT_WGMMA)
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&matrix), "r"(column), "r"(row), "r"(barrier)
      : "memory");
#endif
}

// The same for a tile of images of bytes in the 64-byte swizzle; `channel` is a byte.
__device__ inline void load_pixels(uint32_t to, const Matrix& images, int image, int line, int column, int channel,
                                   uint32_t barrier) {
#if defined(SD_ORT_WGMMA)
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&images), "r"(channel), "r"(column), "r"(line), "r"(image), "r"(barrier)
      : "memory");
#endif
}

// Copies the tile at shared memory address `from` to (row, column). The source is read until wait_for_reads() returns.
__device__ inline void store(const Matrix& matrix, int row, int column, uint32_t from) {
#if defined(SD_ORT_WGMMA)
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&matrix),
               "r"(column), "r"(row), "r"(from)
               : "memory");
#endif
}
__device__ inline void store_pixels(const Matrix& images, int image, int line, int column, int channel, uint32_t from) {
#if defined(SD_ORT_WGMMA)
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&images),
               "r"(channel), "r"(column), "r"(line), "r"(image), "r"(from)
               : "memory");
#endif
}
__device__ inline void commit_stores() {
#if defined(SD_ORT_WGMMA)
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ inline void wait_for_reads() {
#if defined(SD_ORT_WGMMA)
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
__device__ inline void wait_for_stores() {
#if defined(SD_ORT_WGMMA)
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Host: cuTensorMapEncodeTiled, or null if the driver is too old.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return encode;
}

// Host: describes a contiguous, 16-byte aligned matrix (rows, columns) with columns a multiple of 8, and tiles of
// (tile_rows, 64). Returns false if the driver is too old or rejects it.
inline bool describe(Matrix* matrix, const void* data, int64_t rows, int64_t columns, int tile_rows) {
  const uint64_t sizes[] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)}, strides[] = {2 * sizes[0]};
  const uint32_t tile[] = {wgmma::kPanelColumns, static_cast<uint32_t>(tile_rows)}, steps[] = {1, 1};
  return encode_tiled() != nullptr && encode_tiled()(matrix, kUint16, 2, const_cast<void*>(data), sizes, strides, tile,
                                                     steps, kNoInterleave, kSwizzle128, kPromote128Bytes, kZeros) == 0;
}

// Host: the same for contiguous images (images, lines, columns, bytes of channels), the last a multiple of 16, and
// tiles of (tile[0], tile[1], tile[2], 64).
inline bool describe_pixels(Matrix* matrix, const void* data, const int64_t (&shape)[4], const int (&tile)[3]) {
  uint64_t sizes[4], strides[3], bytes = 1;
  uint32_t box[4] = {wgmma::kHalfRowBytes}, steps[4];
  for (int axis = 0; axis < 4; ++axis) {  // innermost first
    sizes[axis] = static_cast<uint64_t>(shape[3 - axis]);
    steps[axis] = 1;
    if (axis > 0) strides[axis - 1] = bytes, box[axis] = static_cast<uint32_t>(tile[3 - axis]);
    bytes *= sizes[axis];
  }
  return encode_tiled() != nullptr && encode_tiled()(matrix, kUint8, 4, const_cast<void*>(data), sizes, strides, box,
                                                     steps, kNoInterleave, kSwizzle64, kPromote128Bytes, kZeros) == 0;
}

}  // namespace bulk
}  // namespace sd_ort
#endif
namespace sd_ort {
namespace bulk {

// Arrival of a wave, for barriers that count waves: what one wave has waited for does not cover the others.
__device__ inline void arrive_wave(uint32_t barrier) {
  if (mma::lane_id() == 0) arrive(barrier);
}

// Current one of kStages stages in shared memory that are filled and emptied in turn, and the phase parity of its
// barriers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ void skip(int count) {
    stage += count;
    const int rounds = stage / kStages;
    stage -= rounds * kStages;
    parity ^= rounds & 1;
  }
};

}  // namespace bulk
}  // namespace sd_ort
#endif
