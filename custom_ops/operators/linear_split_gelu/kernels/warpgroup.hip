// LinearSplitGelu for fp16 and bf16 on NVIDIA's warpgroup instructions (sm_90a): common/gated_gemm.h. Bound by the
// GEMM.
//
// linear_split_gelu_kernel<T>
#include <algorithm>

#include "common/gated_gemm.h"
#include "operators/linear_split_gelu/op.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS
namespace {

// X (rows, depth) by W (depth, columns).
template <class T>
struct HalfOperands {
  static constexpr bool kTransposed = false;

  __device__ static void multiply(mma::Accumulator (&sums)[gated::kHalfTiles], uint32_t x, uint32_t weight, int part,
                                  bool add) {
    x += part * mma::kTile * sizeof(T);
    weight += part * mma::kTile * wgmma::kRowBytes;
    wgmma::multiply_n_major<T>(sums, wgmma::descriptor(x, 16, wgmma::kAtomBytes),
                               wgmma::descriptor(weight, gated::kPanelBytes, wgmma::kAtomBytes), add);
  }
};

}  // namespace

template <class T>
__global__ __launch_bounds__(gated::kThreads,
                             1) void linear_split_gelu_kernel(const __grid_constant__ bulk::Matrix x,
                                                              const __grid_constant__ bulk::Matrix weight,
                                                              const __grid_constant__ bulk::Matrix y, const T* bias,
                                                              gated::Tiles tiles) {
  wait_for_predecessor();
  gated::run_block<HalfOperands<T>>(x, weight, [&] { return gated::Rows<T>{y}; }, bias, tiles);
}

namespace {

template <class T>
const char* run(const LinearSplitGeluParams& p, void* stream) {
  bulk::Matrix x, weight, y;
  if (!bulk::describe(&x, p.x, p.rows, p.inner, gated::kRows) ||
      !bulk::describe(&weight, p.weight, p.inner, 2 * p.half, gated::kDepth) ||
      !bulk::describe(&y, p.y, p.rows, p.half, gated::kWaveRows)) {
    return "the driver does not describe the matrices";
  }
  const auto tiles = gated::Tiles::of(p.rows, p.half, ceil_div(p.inner, gated::kDepth));
  return launch(linear_split_gelu_kernel<T>, dim3(std::min(tiles.count, multiprocessors())), dim3(gated::kThreads),
                gated::kLdsBytes, stream, x, weight, y, static_cast<const T*>(p.bias), tiles);
}

}  // namespace

bool linear_split_gelu_supports_warpgroups(const LinearSplitGeluParams& p) {
  const int64_t steps = ceil_div(p.inner, gated::kDepth);
  const int64_t count = ceil_div(p.rows, gated::kRows) * ceil_div(p.half, gated::kColumns);
  return wgmma::are_compiled() && p.dtype != DType::kFloat32 && count > 0 && steps >= 2 * gated::kEdge &&
         p.inner % 8 == 0 && p.half % 8 == 0 && std::max({p.rows, p.inner, 2 * p.half, count}) < INT32_MAX / 2 &&
         are_aligned<16>(p.x, p.weight, p.bias, p.y);
}

const char* linear_split_gelu_warpgroups(const LinearSplitGeluParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run<half_t>(p, stream) : run<bf16_t>(p, stream);
}

#endif
}  // namespace sd_ort
