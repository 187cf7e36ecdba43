// The bulk copies and barriers that common/bulk_copy.h wraps, in software, from NVIDIA's PTX ISA: "mbarrier" (a phase
// ends when no arrival and no byte is pending) and "cp.async.bulk.tensor" (rows of a tile one after another, 128 bytes
// each, swizzled; zeros for what lies outside). Here a copy is done at once.
#pragma once

#include <algorithm>

#include "emulator.h"

namespace sd_ort {
namespace bulk {

// A barrier's 8 bytes.
struct Barrier {
  uint8_t arrivals, pending;
  uint16_t phase;
  int32_t bytes;  // expected and not come, or come and not expected yet

  void settle() {
    ++emulator::progress;
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = arrivals;
    }
  }
};

// What a Matrix holds here.
struct Description {
  char* data;
  int64_t rows, columns;
  int tile_rows;
};

constexpr int kRowBytes = 128, kTileColumns = 64;

inline Barrier& barrier_at(uint32_t address) { return *reinterpret_cast<Barrier*>(emulator::dynamic_lds() + address); }

inline void init_barrier(uint32_t barrier, int arrivals) {
  barrier_at(barrier) = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void publish_barriers() {}
inline void arrive_expect_bytes(uint32_t barrier, int bytes) {
  Barrier& b = barrier_at(barrier);
  b.bytes += bytes;
  --b.pending;
  b.settle();
}
inline void arrive(uint32_t barrier) {
  Barrier& b = barrier_at(barrier);
  if (b.pending-- == 0) emulator::fail("mbarrier: more arrivals than were announced");
  b.settle();
}
inline void wait(uint32_t barrier, uint32_t parity) {
  while (barrier_at(barrier).phase % 2 == parity) emulator::yield();
}

inline Description description(const Matrix& matrix) {
  Description d;
  std::memcpy(&d, matrix.bytes, sizeof(d));
  return d;
}

// copy(in memory or null, in shared memory) for every 2-byte element of a tile.
template <class F>
void for_each_element(const Description& d, uint32_t at, int row, int column, F&& copy) {
  if (at % 1024 != 0) emulator::fail("bulk copy: the tile does not begin at an atom of the swizzle");
  for (int r = 0; r < d.tile_rows; ++r) {
    for (int c = 0; c < kTileColumns; ++c) {
      const uint32_t address = at + r * kRowBytes + c * 2;
      const bool inside = row + r < d.rows && column + c < d.columns;
      char* const global = d.data + ((row + r) * d.columns + column + c) * 2;
      copy(inside ? global : nullptr, address ^ (address >> 7 & 7) << 4);
    }
  }
}

inline void load(uint32_t to, const Matrix& matrix, int row, int column, uint32_t barrier) {
  const Description d = description(matrix);
  char* const lds = emulator::dynamic_lds();
  for_each_element(d, to, row, column, [&](const char* from, uint32_t address) {
    if (from != nullptr) std::memcpy(lds + address, from, 2);
    if (from == nullptr) std::memset(lds + address, 0, 2);
  });
  Barrier& b = barrier_at(barrier);
  b.bytes -= d.tile_rows * kRowBytes;
  b.settle();
}

inline void store(const Matrix& matrix, int row, int column, uint32_t from) {
  char* const lds = emulator::dynamic_lds();
  for_each_element(description(matrix), from, row, column, [&](char* to, uint32_t address) {
    if (to != nullptr) std::memcpy(to, lds + address, 2);
  });
}
// Images of bytes, and a tile of them: images, lines, columns and 64 channels.
struct PixelDescription {
  char* data;
  int64_t shape[4];
  int tile[4];
};

// copy(in memory or null, in shared memory) for every byte of a tile, in the swizzle of 64 bytes.
template <class F>
void for_each_byte(const PixelDescription& d, uint32_t at, const int (&from)[4], F&& copy) {
  if (at % 512 != 0) emulator::fail("bulk copy: the tile does not begin at an atom of the swizzle");
  const int count = d.tile[0] * d.tile[1] * d.tile[2] * d.tile[3];
  for (int i = 0; i < count; ++i) {
    int64_t offset = 0, rest = i, index[4];
    for (int axis = 3; axis >= 0; --axis) index[axis] = rest % d.tile[axis] + from[axis], rest /= d.tile[axis];
    bool inside = true;
    for (int axis = 0; axis < 4; ++axis) {
      inside = inside && index[axis] >= 0 && index[axis] < d.shape[axis];
      offset = offset * d.shape[axis] + index[axis];
    }
    const uint32_t address = at + i;
    copy(inside ? d.data + offset : nullptr, address ^ (address >> 7 & 3) << 4);
  }
}

inline PixelDescription pixel_description(const Matrix& matrix) {
  PixelDescription d;
  std::memcpy(&d, matrix.bytes, sizeof(d));
  return d;
}

inline void load_pixels(uint32_t to, const Matrix& images, int image, int line, int column, int channel,
                        uint32_t barrier) {
  const PixelDescription d = pixel_description(images);
  char* const lds = emulator::dynamic_lds();
  for_each_byte(d, to, {image, line, column, channel},
                [&](const char* from, uint32_t address) { lds[address] = from == nullptr ? 0 : *from; });
  Barrier& b = barrier_at(barrier);
  b.bytes -= d.tile[0] * d.tile[1] * d.tile[2] * d.tile[3];
  b.settle();
}

inline void store_pixels(const Matrix& images, int image, int line, int column, int channel, uint32_t from) {
  char* const lds = emulator::dynamic_lds();
  for_each_byte(pixel_description(images), from, {image, line, column, channel}, [&](char* to, uint32_t address) {
    if (to != nullptr) *to = lds[address];
  });
}

inline bool describe_pixels(Matrix* matrix, const void* data, const int64_t (&shape)[4], const int (&tile)[3]) {
  PixelDescription d = {static_cast<char*>(const_cast<void*>(data)), {}, {tile[0], tile[1], tile[2], 64}};
  std::copy(shape, shape + 4, d.shape);
  static_assert(sizeof(d) <= sizeof(matrix->bytes));
  std::memcpy(matrix->bytes, &d, sizeof(d));
  return true;
}

inline void commit_stores() {}
inline void wait_for_reads() {}
inline void wait_for_stores() {}

inline bool describe(Matrix* matrix, const void* data, int64_t rows, int64_t columns, int tile_rows) {
  const Description d = {static_cast<char*>(const_cast<void*>(data)), rows, columns, tile_rows};
  static_assert(sizeof(d) <= sizeof(matrix->bytes));
  std::memcpy(matrix->bytes, &d, sizeof(d));
  return true;
}

}  // namespace bulk
}  // namespace sd_ort
