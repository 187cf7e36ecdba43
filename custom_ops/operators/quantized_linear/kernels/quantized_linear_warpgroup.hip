// QuantizedLinear for float8 with `gated` on NVIDIA's warpgroup instructions (sm_90a): common/gated_gemm.h with
// elements of one byte and W transposed.
//
// quantized_linear_gated_kernel<T, kFloat8>: Y in T, or in float8
#include <algorithm>

#include "common/gated_gemm.h"
#include "common/quantized_output.h"
#include "common/wgmma_float8.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS
namespace {

constexpr int kFloat8Stride = gated::kHalfColumns + 16;  // of rows in shared memory, which keeps banks apart

// X (rows, depth) by W (columns, depth).
struct Float8Operands {
  static constexpr bool kTransposed = true;

  __device__ static void multiply(mma::Accumulator (&sums)[gated::kHalfTiles], uint32_t x, uint32_t weight, int part,
                                  bool add) {
    const uint32_t offset = part * wgmma::kFloat8Depth;
    wgmma::multiply_float8(sums, wgmma::descriptor(x + offset, 16, wgmma::kAtomBytes),
                           wgmma::descriptor(weight + offset, 16, wgmma::kAtomBytes), add);
  }
};

template <class T>
struct ScaledRows : gated::Rows<T> {
  float scale;

  __device__ ScaledRows(const bulk::Matrix& y, float scale) : gated::Rows<T>{y}, scale(scale) {}
  __device__ float scaled(float sum) const { return scale * sum; }
};

// Y in float8.
struct Float8Rows {
  uint8_t* data;
  int rows;
  float factor;  // 1 / scale of Y
};

struct ScaledFloat8Rows {
  const Float8Rows& y;
  float scale;

  __device__ float scaled(float sum) const { return scale * sum; }
  __device__ void begin() const {}
  __device__ void put(char* lds, int row, int piece, const float (&values)[2]) const {
    char* const to = lds + row * kFloat8Stride + piece * 8;
    store_float8(reinterpret_cast<uint8_t*>(to) + mma::lane_id() % 4 * 2, values, y.factor);
  }
  // Copies 16 rows of 64 elements from shared memory to Y, 16 at once.
  __device__ void end(const char* lds, int row, int column, int columns) const {
    constexpr int kParts = gated::kHalfColumns / 16;
    wave_barrier();
#pragma unroll
    for (int i = 0; i < gated::kWaveRows * kParts / mma::kWave; ++i) {
      const int item = mma::lane_id() + i * mma::kWave, in_tile = item / kParts, part = item % kParts * 16;
      if (row + in_tile >= y.rows || column + part >= columns) continue;
      const auto elements = *reinterpret_cast<const FourRegisters*>(lds + in_tile * kFloat8Stride + part);
      const int64_t at = static_cast<int64_t>(row + in_tile) * columns + column + part;
      *reinterpret_cast<FourRegisters*>(y.data + at) = elements;
    }
  }
};

}  // namespace

template <class T, bool kFloat8>
__global__ __launch_bounds__(gated::kThreads, 1) void quantized_linear_gated_kernel(
    const __grid_constant__ bulk::Matrix x, const __grid_constant__ bulk::Matrix weight,
    const __grid_constant__ bulk::Matrix y, const __grid_constant__ Float8Rows float8, const T* bias,
    const float* scale, gated::Tiles tiles) {
  wait_for_predecessor();
  if constexpr (kFloat8) {
    gated::run_block<Float8Operands>(x, weight, [&] { return ScaledFloat8Rows{float8, *scale}; }, bias, tiles);
  } else {
    gated::run_block<Float8Operands>(x, weight, [&] { return ScaledRows<T>(y, *scale); }, bias, tiles);
  }
}

namespace {

template <class T>
const char* run(const QuantizedLinearParams& p, void* stream) {
  const int64_t half = p.columns / 2;
  const bool float8 = p.quantized.data != nullptr;
  bulk::Matrix x, weight, y = {};
  if (!bulk::describe(&x, p.x, p.rows, p.inner / 2, gated::kRows) ||
      !bulk::describe(&weight, p.weight, p.columns, p.inner / 2, gated::kHalfColumns) ||
      !(float8 || bulk::describe(&y, p.y, p.rows, half, gated::kWaveRows))) {
    return "the driver does not describe the matrices";
  }
  const auto tiles = gated::Tiles::of(p.rows, half, ceil_div(p.inner, 2 * gated::kDepth));
  const Float8Rows rows = {static_cast<uint8_t*>(p.quantized.data), static_cast<int>(p.rows), 1.f / p.quantized.scale};
  const auto kernel = float8 ? quantized_linear_gated_kernel<T, true> : quantized_linear_gated_kernel<T, false>;
  return launch(kernel, dim3(std::min(tiles.count, multiprocessors())), dim3(gated::kThreads), gated::kLdsBytes, stream,
                x, weight, y, rows, static_cast<const T*>(p.bias), p.scale, tiles);
}

}  // namespace

bool quantized_linear_supports_warpgroups(const QuantizedLinearParams& p) {
  const int64_t half = p.columns / 2, steps = ceil_div(p.inner, 2 * gated::kDepth);
  const int64_t count = ceil_div(p.rows, gated::kRows) * ceil_div(half, gated::kColumns);
  return wgmma::are_compiled() && p.dtype != DType::kFloat32 && p.eight_bits == DType::kFloat8 && p.gated &&
         p.scales == 1 && count > 0 && steps >= 2 * gated::kEdge && p.inner % 16 == 0 &&
         half % (p.quantized.data == nullptr ? 8 : 16) == 0 && (p.y == nullptr) != (p.quantized.data == nullptr) &&
         std::max({p.rows, p.inner, p.columns, count}) < INT32_MAX / 2 &&
         are_aligned<16>(p.x, p.weight, p.bias, p.y, p.quantized.data);
}

const char* quantized_linear_warpgroups(const QuantizedLinearParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run<half_t>(p, stream) : run<bf16_t>(p, stream);
}

#endif
}  // namespace sd_ort
