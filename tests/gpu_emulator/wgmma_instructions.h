// The warpgroup matrix instructions that common/wgmma.h wraps, in software. Where descriptors lead is written here from
// NVIDIA's PTX ISA, "Asynchronous warpgroup level matrix instructions": a matrix is given by its start, its strides and
// the 128-byte swizzle, which exchanges bits 4-6 of an address with themselves XOR bits 7-9, or for float8 also that of
// 64 bytes, bits 4-5 XOR bits 7-8. Here a multiplication is done at once.
#pragma once

#include "common/float8.h"
#include "emulator.h"
#include "mma_instructions.h"

namespace sd_ort {
namespace wgmma {

struct Matrix {
  uint32_t start, leading, stride;

  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emulator::fail("wgmma: not the 128-byte swizzle");
  }
  template <class T>
  static float at(uint32_t address) {
    T value;
    std::memcpy(&value, emulator::dynamic_lds() + (address ^ (address >> 7 & 7) << 4), sizeof(value));
    return to_float(value);
  }
  template <class T>
  float k_major(int row, int depth) const {
    return at<T>(start + row / 8 * stride + row % 8 * 128 + depth * 2);
  }
  template <class T>
  float n_major(int column, int depth) const {
    return at<T>(start + column / 64 * leading + column % 64 * 2 + depth / 8 * stride + depth % 8 * 128);
  }
};

inline void fence() {}
inline void fence_stores() {}
inline void commit() {}
template <int kLeft>
void wait() {}

template <class T, int kTiles>
void multiply(mma::Accumulator (&d)[kTiles], uint64_t a_descriptor, uint64_t b_descriptor, bool add) {
  const Matrix a(a_descriptor), b(b_descriptor);
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int i = 0; i < 8; ++i) {
      // D: row lane / 4 (+ 8) of the warp's 16, columns lane % 4 * 2 (+ 1) of each 8
      const int row = thread / 32 * 16 + lane / 4 + 8 * (i / 2 % 2);
      const int column = tile * 16 + 8 * (i / 4) + lane % 4 * 2 + i % 2;
      double sum = add ? d[tile].x[i] : 0.f;
      for (int k = 0; k < 16; ++k) sum += double(a.k_major<T>(row, k)) * b.k_major<T>(column, k);
      d[tile].x[i] = static_cast<float>(sum);
    }
  }
}

template <class T>
void multiply_n_major(mma::Accumulator (&d)[8], uint64_t a_descriptor, uint64_t b_descriptor, bool add) {
  const Matrix a(a_descriptor), b(b_descriptor);
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  float rows[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 2; ++i) rows[i][k] = a.k_major<T>(thread / 32 * 16 + lane / 4 + 8 * i, k);
  }
  for (int tile = 0; tile < 8; ++tile) {
    for (int i = 0; i < 8; ++i) {
      const int column = tile * 16 + 8 * (i / 4) + lane % 4 * 2 + i % 2;
      double sum = add ? d[tile].x[i] : 0.f;
      for (int k = 0; k < 16; ++k) sum += double(rows[i / 2 % 2][k]) * b.n_major<T>(column, k);
      d[tile].x[i] = static_cast<float>(sum);
    }
  }
}
template <int kTiles>
void settle(mma::Accumulator (&)[kTiles]) {}

// float8: elements of one byte, 32 in the depth.
template <int kTiles>
void multiply_float8(mma::Accumulator (&d)[kTiles], uint64_t a_descriptor, uint64_t b_descriptor, bool add) {
  const bool half_rows = a_descriptor >> 62 == 2;
  if (half_rows != (b_descriptor >> 62 == 2)) emulator::fail("wgmma: here both operands have the same swizzle");
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kMode = uint64_t{3} << 62;
  const Matrix a((a_descriptor & ~kMode) | kSwizzle128), b((b_descriptor & ~kMode) | kSwizzle128);
  const auto element = [=](const Matrix& matrix, int row, int depth) {
    const uint32_t address = matrix.start + row / 8 * matrix.stride + row % 8 * (half_rows ? 64 : 128) + depth;
    const uint32_t swizzle = address >> 7 & (half_rows ? 3 : 7);
    return float8_to_float(static_cast<uint8_t>(emulator::dynamic_lds()[address ^ swizzle << 4]));
  };
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  float rows[2][32];
  for (int k = 0; k < 32; ++k) {
    for (int i = 0; i < 2; ++i) rows[i][k] = element(a, thread / 32 * 16 + lane / 4 + 8 * i, k);
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int i = 0; i < 8; ++i) {
      const int column = tile * 16 + 8 * (i / 4) + lane % 4 * 2 + i % 2;
      double sum = add ? d[tile].x[i] : 0.f;
      for (int k = 0; k < 32; ++k) sum += double(rows[i / 2 % 2][k]) * element(b, column, k);
      d[tile].x[i] = static_cast<float>(sum);
    }
  }
}

template <int kRegisters>
void give_registers_but() {}
template <int kRegisters>
void take_registers() {}

template <class T, int kTiles>
void multiply_add(mma::Accumulator (&d)[kTiles], const mma::Operand<T>& a, uint64_t b_descriptor) {
  struct Given {
    uint32_t r[4];
  };
  struct Rows {
    uint32_t r[4][4];  // register, lane of the quad: of the rows lane / 4 and lane / 4 + 8
  };
  const Matrix b(b_descriptor);
  Given mine;
  std::memcpy(mine.r, &a.r, sizeof(mine.r));
  const auto quad = emulator::exchange<Rows>(mine, "wgmma", [](const Given* given, Rows* taken) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        for (int i = 0; i < 4; ++i) taken[lane].r[r][i] = given[lane / 4 * 4 + i].r[r];
      }
    }
  });
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int i = 0; i < 8; ++i) {
      const int column = tile * 16 + 8 * (i / 4) + lane % 4 * 2 + i % 2;
      double sum = d[tile].x[i];
      for (int k = 0; k < 16; ++k) {
        // A: a0,a1 (g, 2t), a2,a3 (g + 8, 2t), a4,a5 (g, 2t + 8), a6,a7 (g + 8, 2t + 8)
        const uint32_t packed = quad.r[i / 2 % 2 + 2 * (k / 8)][k % 8 / 2];
        sum += double(mma::element<T>(packed, k % 2)) * b.n_major<T>(column, k);
      }
      d[tile].x[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace wgmma
}  // namespace sd_ort
