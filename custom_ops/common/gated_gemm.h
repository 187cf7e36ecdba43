// A gated linear layer, (X W_left + b_left) gelu(X W_right + b_right), on NVIDIA's warpgroup instructions (sm_90a). A
// block computes tiles of 128 rows and 128 columns of Y in turn. A thread of the first warpgroup copies X and W to a
// ring of stages in shared memory; the other two warpgroups each multiply 64 rows by 128 left columns and the matching
// 128 right columns, so that both factors of an element are in one thread. While a warpgroup computes the gate of half
// of its columns, it runs the last steps of the GEMM of the other half, or the first steps of the next tile.
//
// `Operands` has the instruction: a stage of X and of W has 128 bytes of the depth, which it multiplies in four parts.
// An output scales the sums and writes the 16 rows of a wave; `Outputs` returns one to each thread that multiplies.
#pragma once

#include "common/bulk_copy.h"
#include "common/math.h"
#include "common/wgmma.h"

#if SD_ORT_HAS_WARPGROUPS
namespace sd_ort {
namespace gated {

constexpr int kGroups = 2, kThreads = wgmma::kThreads * (1 + kGroups);
constexpr int kRows = wgmma::kRows * kGroups, kColumns = 128;  // of a tile
constexpr int kHalfColumns = 64, kHalfTiles = 2 * kHalfColumns / mma::kTile;
constexpr int kDepth = wgmma::kRowBytes / 2, kParts = 4;  // of a stage, in elements of two bytes, which copies are of
constexpr int kPanels = 2 * kColumns / kHalfColumns;      // of W: left and right alternate
constexpr int kPanelBytes = kHalfColumns * wgmma::kRowBytes;
constexpr int kXBytes = kRows * wgmma::kRowBytes, kWeightBytes = kPanels * kPanelBytes;
constexpr int kStages = 4, kEdge = kStages / 2;  // steps at both ends of a tile that are computed by halves
constexpr int kYBytes = kRows * kColumns * 2, kWaveRows = 16;
constexpr int kBarriersAt = kStages * (kXBytes + kWeightBytes) + kYBytes;
constexpr int kLdsBytes = kBarriersAt + 2 * kStages * 8;

struct Tiles {
  int steps;    // of the depth
  int down;     // rows of tiles
  int count;    // down * columns of tiles
  int columns;  // of Y

  // Of Y (rows, columns), where `steps` stages have the depth.
  static Tiles of(int64_t rows, int64_t columns, int64_t steps) {
    const int64_t down = ceil_div(rows, kRows);
    return {static_cast<int>(steps), static_cast<int>(down), static_cast<int>(down * ceil_div(columns, kColumns)),
            static_cast<int>(columns)};
  }
};

using Ring = bulk::Ring<kStages>;

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

template <class Operands>
__device__ inline void load_tiles(const Lds& lds, const bulk::Matrix& x, const bulk::Matrix& weight,
                                  const Tiles& tiles) {
  Ring ring;
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const int row = tile % tiles.down * kRows, column = tile / tiles.down * kColumns;
    for (int step = 0; step < tiles.steps; ++step, ring.next()) {
      bulk::wait(lds.emptied(ring.stage), ring.parity ^ 1);
      const uint32_t filled = lds.filled(ring.stage);
      bulk::arrive_expect_bytes(filled, kXBytes + kWeightBytes);
      bulk::load(lds.x(ring.stage), x, row, step * kDepth, filled);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int from = column + panel / 2 * kHalfColumns + panel % 2 * tiles.columns;
        const uint32_t to = lds.weight(ring.stage) + panel * kPanelBytes;
        if (Operands::kTransposed) {
          bulk::load(to, weight, from, step * kDepth, filled);
        } else {
          bulk::load(to, weight, step * kDepth, from, filled);
        }
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

// Y in the type of the bias, through shared memory.
template <class T>
struct Rows {
  const bulk::Matrix& y;

  __device__ float scaled(float sum) const { return sum; }
  __device__ void begin() const { bulk::wait_for_reads(); }  // of the previous tile
  // Two adjacent columns of `piece`, which has 8.
  __device__ void put(char* lds, int row, int piece, const float (&values)[2]) const {
    char* const to = lds + wgmma::piece_offset(row, piece);
    Vec<T, 2>::pack(values).store(reinterpret_cast<T*>(to) + mma::lane_id() % 4 * 2);
  }
  // Writes 16 rows of kHalfColumns columns.
  __device__ void end(const char* lds, int row, int column, int) const {
    wgmma::fence_stores();
    wave_barrier();
    if (mma::lane_id() == 0) {
      bulk::store(y, row, column, wgmma::address_of(lds));
      bulk::commit_stores();
    }
  }
};

// Work of a warpgroup.
template <class T, class Operands, class Output>
class Group {
 public:
  __device__ Group(const Lds& lds, char* y_lds, Output output, const T* bias, const Tiles& tiles)
      : lds_(lds),
        output_(output),
        bias_(bias),
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
    Operands::multiply(sums_[kHalf], lds_.x(stage) + x_bytes_, lds_.weight(stage) + 2 * kHalf * kPanelBytes, i, add);
  }

  // Multiplies all columns by the next step.
  __device__ void multiply_step() {
    bulk::wait(lds_.filled(filled_.stage), filled_.parity);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
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
      for (int i = 0; i < kParts; ++i) {
        multiply<kHalf>(ring.stage, i, !is_first || step > 0 || i > 0);
      }
    }
    wgmma::commit();
  }

  // Releases the next `count` stages.
  __device__ void empty(int count) {
    for (int i = 0; i < count; ++i, emptied_.next()) bulk::arrive_wave(lds_.emptied(emptied_.stage));
  }

  // Writes the 16 rows of this wave for half of a tile.
  template <int kHalf>
  __device__ void write(const Shifts<T>& shifts, int row, int column) {
    constexpr int kPanel = kWaveRows * wgmma::kRowBytes;
    char* const lds = y_lds_ + kHalf * kPanel;
    const int lane = mma::lane_id();
    output_.begin();
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
          left[j] = (left[j] + output_.scaled(lefts[tile].x[i + j])) *
                    gelu_by_logit(right[j] + output_.scaled(rights[tile].x[i + j]));
        }
        output_.put(lds, mma::accumulator_row(lane, i), piece, left);
      }
    }
    output_.end(lds, row, column + kHalf * kHalfColumns, tiles_.columns);
  }

  const Lds& lds_;
  const Output output_;
  const T* const bias_;
  const Tiles& tiles_;
  const int wave_;
  char* const y_lds_;
  const uint32_t x_bytes_;
  mma::Accumulator sums_[2][kHalfTiles];  // for each half: left factors, then gate inputs
  Ring filled_, emptied_;
};

// The kernel. Launch: block (kThreads, 1, 1), grid (min(multiprocessors, tiles), 1, 1), dynamic LDS kLdsBytes.
template <class Operands, class T, class Outputs>
__device__ void run_block(const bulk::Matrix& x, const bulk::Matrix& weight, const Outputs& outputs, const T* bias,
                          const Tiles& tiles) {
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
    if (threadIdx.x == 0) load_tiles<Operands>(lds, x, weight, tiles);
  } else {
    wgmma::take_registers<232>();
    char* const y_lds = dynamic + kStages * (kXBytes + kWeightBytes);
    Group<T, Operands, decltype(outputs())>(lds, y_lds, outputs(), bias, tiles).run();
  }
#endif
}

}  // namespace gated
}  // namespace sd_ort
#endif
