// QuantizedLinear for float8 with `gated` on NVIDIA's warpgroup instructions (sm_90a): the kernel of LinearSplitGelu
// with elements of one byte and W transposed. A block computes tiles of 128 rows and 128 columns of Y in turn. A thread
// of the first warpgroup copies X and W to a ring of stages in shared memory; the other two warpgroups each multiply 64
// rows by 128 left columns and the matching 128 right columns, so that both factors of an element are in one thread.
// While a warpgroup computes the gate of half of its columns, it runs the last steps of the GEMM of the other half, or
// the first steps of the next tile.
//
// quantized_linear_gated_kernel<T, kFloat8>: Y in T, or in float8
//   Launch: block (384, 1, 1), grid (min(multiprocessors, tiles), 1, 1), dynamic LDS kLdsBytes.
#include <algorithm>

#include "common/bulk_copy.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "common/wgmma_float8.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS
namespace {

constexpr int kGroups = 2, kThreads = wgmma::kThreads * (1 + kGroups);
constexpr int kRows = wgmma::kRows * kGroups, kColumns = 128, kDepth = 128;  // of a tile, and of a stage
constexpr int kPanelRows = 64;                                               // of W, that is, columns of X W^T
constexpr int kPanels = 2 * kColumns / kPanelRows;                           // left and right alternate
constexpr int kPanelBytes = kPanelRows * wgmma::kRowBytes;
constexpr int kPairDepth = kDepth / 2;  // copies are of matrices of two-byte elements
constexpr int kXBytes = kRows * wgmma::kRowBytes, kWeightBytes = kPanels * kPanelBytes;
constexpr int kStages = 4, kEdge = kStages / 2;  // steps at both ends of a tile that are computed by halves
constexpr int kHalfColumns = kPanelRows, kHalfTiles = 2 * kHalfColumns / mma::kTile;
constexpr int kYBytes = kRows * kColumns * 2, kWaveRows = 16;
constexpr int kFloat8Stride = kHalfColumns + 16;  // of rows in shared memory, which keeps banks apart
constexpr int kBarriersAt = kStages * (kXBytes + kWeightBytes) + kYBytes;
constexpr int kLdsBytes = kBarriersAt + 2 * kStages * 8;

// Y in float8.
struct Float8Rows {
  uint8_t* data;
  int rows;
  float factor;  // 1 / scale
};

struct Tiles {
  int steps;    // of the depth
  int down;     // rows of tiles
  int count;    // down * columns of tiles
  int columns;  // of Y
};

// Current stage of the ring, and the phase parity of its barriers.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ void skip(int count) {
    for (int i = 0; i < count; ++i) next();
  }
};

// Addresses in shared memory.
struct Lds {
  uint32_t start;
  __device__ uint32_t x(int stage) const { return start + stage * kXBytes; }
  __device__ uint32_t weight(int stage) const { return start + kStages * kXBytes + stage * kWeightBytes; }
  __device__ uint32_t filled(int stage) const { return start + kBarriersAt + stage * 8; }
  __device__ uint32_t emptied(int stage) const { return filled(kStages + stage); }
};

// x Phi(x), with the logit of Phi as an odd polynomial of x (own least-squares fit of ln(Phi / (1 - Phi)), weighted by
// the effect of an error on the result): absolute error 3.1e-6. Half the instructions of gelu() in math.h.
__device__ inline float gelu_by_logit(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float s = x * x;
  const float logit =
      x * (1.59565627f + s * (7.29375790e-02f + s * (-2.49721293e-04f + s * (-6.11624168e-05f + s * 2.23818824e-06f))));
  return x * reciprocal(1.f + power_of_two(-kLog2E * logit));
}

__device__ inline void load_tiles(const Lds& lds, const bulk::Matrix& x, const bulk::Matrix& weight,
                                  const Tiles& tiles) {
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const int row = tile % tiles.down * kRows, column = tile / tiles.down * kColumns;
    for (int step = 0; step < tiles.steps; ++step, ring.next()) {
      bulk::wait(lds.emptied(ring.stage), ring.parity ^ 1);
      const uint32_t filled = lds.filled(ring.stage);
      bulk::arrive_expect_bytes(filled, kXBytes + kWeightBytes);
      bulk::load(lds.x(ring.stage), x, row, step * kPairDepth, filled);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int from = column + panel / 2 * kHalfColumns + panel % 2 * tiles.columns;
        bulk::load(lds.weight(ring.stage) + panel * kPanelBytes, weight, from, step * kPairDepth, filled);
      }
    }
  }
}

// Bias of a thread for half of the columns of a tile: two adjacent columns of each 8, left and right.
template <class T>
struct Shifts {
  static constexpr int kPieces = kHalfColumns / 8;
  Vec<T, 2> left[kPieces], right[kPieces];

  __device__ void load(const T* bias, int column, int columns) {
    column += mma::lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = column + 8 * i < columns ? column + 8 * i : 0;
      left[i] = Vec<T, 2>::load(bias + at);
      right[i] = Vec<T, 2>::load(bias + columns + at);
    }
  }
};

// Work of a warpgroup.
template <class T, bool kFloat8>
class Group {
 public:
  __device__ Group(const Lds& lds, char* y_lds, const bulk::Matrix& y, const Float8Rows& float8, const T* bias,
                   float scale, const Tiles& tiles)
      : lds_(lds),
        y_(y),
        float8_(float8),
        bias_(bias),
        scale_(scale),
        tiles_(tiles),
        wave_(wave_id() - wgmma::kThreads / mma::kWave),
        y_lds_(y_lds + wave_ * kWaveRows * kColumns * 2),
        x_bytes_(wave_ / (wgmma::kThreads / mma::kWave) * wgmma::kRows * wgmma::kRowBytes) {}

  __device__ void run() {
    Shifts<T> shifts[2];
    int tile = blockIdx.x;
    multiply_edge<0>(true);
    multiply_edge<1>(true);
    filled_.skip(kEdge);
    int row, column;
    while (true) {
      row = tile % tiles_.down * kRows + wave_ * kWaveRows;
      column = tile / tiles_.down * kColumns;
      shifts[0].load(bias_, column, tiles_.columns);
      shifts[1].load(bias_, column + kHalfColumns, tiles_.columns);

      int done = kEdge;  // stages that are free once one more multiplication is issued
      for (int step = kEdge; step < tiles_.steps - kEdge; ++step, done = 1) {
        multiply_step();
        wgmma::wait<1>();
        empty(done);
      }
      multiply_edge<0>(false);
      multiply_edge<1>(false);
      filled_.skip(kEdge);
      wgmma::wait<1>();
      empty(done);
      write<0>(shifts[0], row, column);

      tile += gridDim.x;
      wgmma::wait<0>();
      empty(kEdge);
      if (tile >= tiles_.count) break;
      multiply_edge<0>(true);
      write<1>(shifts[1], row, column);
      multiply_edge<1>(true);
      filled_.skip(kEdge);
    }
    write<1>(shifts[1], row, column);
    bulk::wait_for_stores();
  }

 private:
  // Multiplies half of the columns by part i of the depth of a stage.
  template <int kHalf>
  __device__ void multiply(int stage, int i, bool add) {
    const uint32_t offset = i * wgmma::kFloat8Depth;
    const uint32_t x = lds_.x(stage) + x_bytes_ + offset;
    const uint32_t weight = lds_.weight(stage) + 2 * kHalf * kPanelBytes + offset;
    wgmma::multiply_float8(sums_[kHalf], wgmma::descriptor(x, 16, wgmma::kAtomBytes),
                           wgmma::descriptor(weight, 16, wgmma::kAtomBytes), add);
  }

  // Multiplies all columns by the next step.
  __device__ void multiply_step() {
    bulk::wait(lds_.filled(filled_.stage), filled_.parity);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kDepth / wgmma::kFloat8Depth; ++i) {
      multiply<0>(filled_.stage, i, true);
      multiply<1>(filled_.stage, i, true);
    }
    wgmma::commit();
    filled_.next();
  }

  // Multiplies half of the columns by the next kEdge steps, the first or last of a tile.
  template <int kHalf>
  __device__ void multiply_edge(bool is_first) {
    Ring ring = filled_;
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kEdge; ++step, ring.next()) {
      if (kHalf == 0) bulk::wait(lds_.filled(ring.stage), ring.parity);
#pragma unroll
      for (int i = 0; i < kDepth / wgmma::kFloat8Depth; ++i) {
        multiply<kHalf>(ring.stage, i, !is_first || step > 0 || i > 0);
      }
    }
    wgmma::commit();
  }

  // Releases the next `count` stages. All waves arrive: the wait of one wave does not cover reads of the other waves of
  // its warpgroup.
  __device__ void empty(int count) {
    for (int i = 0; i < count; ++i, emptied_.next()) {
      if (mma::lane_id() == 0) bulk::arrive(lds_.emptied(emptied_.stage));
    }
  }

  // Writes the 16 rows of this wave for half of a tile.
  template <int kHalf>
  __device__ void write(const Shifts<T>& shifts, int row, int column) {
    constexpr int kPanel = kWaveRows * wgmma::kRowBytes;
    char* const lds = y_lds_ + kHalf * kPanel;
    const int lane = mma::lane_id();
    if (!kFloat8) bulk::wait_for_reads();  // of the previous tile
    wave_barrier();
    constexpr int kTiles = kHalfColumns / mma::kTile;
    wgmma::settle(sums_[kHalf]);
    const mma::Accumulator *const lefts = sums_[kHalf], *const rights = lefts + kTiles;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; i += 2) {
        const int piece = 2 * tile + i / 4;  // of 8 columns
        float left[2], right[2];
        shifts.left[piece].unpack(left);
        shifts.right[piece].unpack(right);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          left[j] =
              (left[j] + scale_ * lefts[tile].x[i + j]) * gelu_by_logit(right[j] + scale_ * rights[tile].x[i + j]);
        }
        if constexpr (kFloat8) {
          char* const to = lds + mma::accumulator_row(lane, i) * kFloat8Stride + piece * 8;
          store_float8(reinterpret_cast<uint8_t*>(to) + lane % 4 * 2, left, float8_.factor);
        } else {
          char* const to = lds + wgmma::piece_offset(mma::accumulator_row(lane, i), piece);
          Vec<T, 2>::pack(left).store(reinterpret_cast<T*>(to) + lane % 4 * 2);
        }
      }
    }
    if constexpr (kFloat8) {
      wave_barrier();
      write_float8(lds, row, column + kHalf * kHalfColumns);
      return;
    }
    wgmma::fence_stores();
    wave_barrier();
    if (lane == 0) {
      bulk::store(y_, row, column + kHalf * kHalfColumns, wgmma::address_of(lds));
      bulk::commit_stores();
    }
  }

  // Copies 16 rows of 64 elements from shared memory to Y, 16 at once.
  __device__ void write_float8(const char* lds, int row, int column) const {
    constexpr int kParts = kHalfColumns / 16;
#pragma unroll
    for (int i = 0; i < kWaveRows * kParts / mma::kWave; ++i) {
      const int item = mma::lane_id() + i * mma::kWave, in_tile = item / kParts, part = item % kParts * 16;
      if (row + in_tile >= float8_.rows || column + part >= tiles_.columns) continue;
      const auto elements = *reinterpret_cast<const FourRegisters*>(lds + in_tile * kFloat8Stride + part);
      const int64_t at = static_cast<int64_t>(row + in_tile) * tiles_.columns + column + part;
      *reinterpret_cast<FourRegisters*>(float8_.data + at) = elements;
    }
  }

  const Lds& lds_;
  const bulk::Matrix& y_;
  const Float8Rows& float8_;
  const T* const bias_;
  const float scale_;
  const Tiles& tiles_;
  const int wave_;
  char* const y_lds_;
  const uint32_t x_bytes_;
  mma::Accumulator sums_[2][kHalfTiles];  // for each half: left factors, then gate inputs
  Ring filled_, emptied_;
};

}  // namespace

template <class T, bool kFloat8>
__global__ __launch_bounds__(kThreads,
                             1) void quantized_linear_gated_kernel(const __grid_constant__ bulk::Matrix x,
                                                                   const __grid_constant__ bulk::Matrix weight,
                                                                   const __grid_constant__ bulk::Matrix y,
                                                                   const __grid_constant__ Float8Rows float8,
                                                                   const T* bias, const float* scale, Tiles tiles) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  SD_ORT_DYNAMIC_LDS(char, dynamic);
  const Lds lds = {wgmma::address_of(dynamic)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      bulk::init_barrier(lds.filled(stage), 1);
      bulk::init_barrier(lds.emptied(stage), kGroups * wgmma::kThreads / mma::kWave);
    }
    bulk::publish_barriers();
  }
  block_barrier();
  if (threadIdx.x < wgmma::kThreads) {
    wgmma::give_registers_but<40>();
    if (threadIdx.x == 0) load_tiles(lds, x, weight, tiles);
  } else {
    wgmma::take_registers<232>();
    Group<T, kFloat8>(lds, dynamic + kStages * (kXBytes + kWeightBytes), y, float8, bias, *scale, tiles).run();
  }
#endif
}

namespace {

template <class T>
const char* run(const QuantizedLinearParams& p, void* stream) {
  const int64_t half = p.columns / 2;
  const bool float8 = p.quantized.data != nullptr;
  bulk::Matrix x, weight, y = {};
  if (!bulk::describe(&x, p.x, p.rows, p.inner / 2, kRows) ||
      !bulk::describe(&weight, p.weight, p.columns, p.inner / 2, kPanelRows) ||
      !(float8 || bulk::describe(&y, p.y, p.rows, half, kWaveRows))) {
    return "the driver does not describe the matrices";
  }
  const int64_t down = ceil_div(p.rows, kRows), count = down * ceil_div(half, kColumns);
  const Tiles tiles = {static_cast<int>(ceil_div(p.inner, kDepth)), static_cast<int>(down), static_cast<int>(count),
                       static_cast<int>(half)};
  const Float8Rows rows = {static_cast<uint8_t*>(p.quantized.data), static_cast<int>(p.rows), 1.f / p.quantized.scale};
  const auto kernel = float8 ? quantized_linear_gated_kernel<T, true> : quantized_linear_gated_kernel<T, false>;
  return launch(kernel, dim3(std::min<int64_t>(count, multiprocessors())), dim3(kThreads), kLdsBytes, stream, x, weight,
                y, rows, static_cast<const T*>(p.bias), p.scale, tiles);
}

}  // namespace

bool quantized_linear_supports_warpgroups(const QuantizedLinearParams& p) {
  const int64_t half = p.columns / 2;
  const int64_t steps = ceil_div(p.inner, kDepth), count = ceil_div(p.rows, kRows) * ceil_div(half, kColumns);
  return wgmma::are_compiled() && p.dtype != DType::kFloat32 && p.eight_bits == DType::kFloat8 && p.gated &&
         p.scales == 1 && count > 0 && steps >= 2 * kEdge && p.inner % 16 == 0 &&
         half % (p.quantized.data == nullptr ? 8 : 16) == 0 && (p.y == nullptr) != (p.quantized.data == nullptr) &&
         std::max({p.rows, p.inner, p.columns, count}) < INT32_MAX / 2 &&
         are_aligned<16>(p.x, p.weight, p.bias, p.y, p.quantized.data);
}

const char* quantized_linear_warpgroups(const QuantizedLinearParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run<half_t>(p, stream) : run<bf16_t>(p, stream);
}

#endif
}  // namespace sd_ort
