// QuantizedNhwcConv on NVIDIA's warpgroup instructions (sm_90a), an implicit GEMM. A block computes tiles of 16 lines
// by 8 columns of pixels and kColumns filters in turn. A thread of the first warpgroup copies X and W to a ring of
// stages in shared memory, another one skip to where Y is written from. The other two warpgroups take turns: one
// multiplies its tile while the other adds bias and skip to the tile before, and writes it.
//
// With several splits a tile's channels are divided among blocks, which write float32 sums instead of Y: small images
// have fewer tiles than the device has multiprocessors.
//
// A stage has 64 channels and one column of the filter: the pixels of a tile shifted by it, with a line above and one
// below, and three filter taps. A line of 8 pixels is an atom of the swizzle, so that a tap's pixels start at one.
//
// quantized_nhwc_conv_kernel<T, kColumns>
//   T is the type of bias, skip and Y; float for the sums of splits.
#include <algorithm>
#include <type_traits>

#include "common/bulk_copy.h"
#include "common/divisor.h"
#include "common/wgmma_float8.h"
#include "operators/quantized_nhwc_conv/op.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS
namespace {

constexpr int kGroups = 2, kThreads = wgmma::kThreads * (1 + kGroups), kWaves = wgmma::kThreads / mma::kWave;
constexpr int kTaps = 3;                         // of a line or a column of the filter
constexpr int kTileWidth = 8, kTileHeight = 16;  // pixels
constexpr int kBlocks = kTileWidth * kTileHeight / wgmma::kRows, kBlockLines = wgmma::kRows / kTileWidth;
constexpr int kDepth = wgmma::kHalfRowBytes, kParts = kDepth / wgmma::kFloat8Depth;  // channels of a stage
constexpr int kXBytes = (kTileHeight + kTaps - 1) * wgmma::kHalfAtomBytes;
constexpr int kWaveLines = 16 / kTileWidth;
constexpr int kPanelColumns = wgmma::kHalfRowBytes / 2;  // of Y, whose tile is panels in the swizzle
constexpr int kPanelBytes = kTileHeight * wgmma::kHalfAtomBytes;
constexpr int kMaxStages = 5, kMaxBarriers = 2 * kMaxStages + 2 * kGroups + 1, kLdsLimit = 227 * 1024;

template <int kColumns>
struct Sizes {
  static constexpr int kTapBytes = kColumns * kDepth, kStageBytes = kXBytes + kTaps * kTapBytes;
  static constexpr int kPanels = kColumns / kPanelColumns, kYBytes = kPanels * kPanelBytes;
  static constexpr int kStages = std::min(kMaxStages, (kLdsLimit - kYBytes - kMaxBarriers * 8) / kStageBytes);
  static constexpr int kYAt = kStages * kStageBytes, kBarriersAt = kYAt + kYBytes;
  static constexpr int kLdsBytes = kBarriersAt + kMaxBarriers * 8;
  static_assert(kStageBytes % wgmma::kHalfAtomBytes == 0 && kTapBytes % wgmma::kHalfAtomBytes == 0);
};

struct Tiles {
  int steps;                             // stages of a tile in a split
  int count;                             // of all splits
  Divisor split, columns, across, down;  // tiles of a split, of filters, of a line of pixels, of an image
};

// First stage, filter and pixel of a tile in a split. Tiles of the same pixels follow one another, so that X is read
// once. The last split may have stages behind the last channel, which are zeros.
struct Tile {
  int split, step, filter, column, line, image;

  __device__ Tile(const Tiles& tiles, int index, int columns) {
    split = tiles.split.divide(index);
    step = split * tiles.steps;
    index = tiles.split.remainder(index, split);
    const uint32_t pixels = tiles.columns.divide(index), lines = tiles.across.divide(pixels);
    filter = tiles.columns.remainder(index, pixels) * columns;
    column = tiles.across.remainder(pixels, lines) * kTileWidth;
    image = tiles.down.divide(lines);
    line = tiles.down.remainder(lines, image) * kTileHeight;
  }
};

// Addresses in shared memory: tiles, then barriers.
template <int kColumns>
struct Lds {
  using S = Sizes<kColumns>;
  uint32_t start;
  __device__ uint32_t x(int stage) const { return start + stage * S::kStageBytes; }
  __device__ uint32_t filters(int stage, int tap) const { return x(stage) + kXBytes + tap * S::kTapBytes; }
  __device__ uint32_t y(int panel) const { return start + S::kYAt + panel * kPanelBytes; }
  __device__ uint32_t barrier(int index) const { return start + S::kBarriersAt + index * 8; }
  __device__ uint32_t filled(int stage) const { return barrier(stage); }
  __device__ uint32_t emptied(int stage) const { return barrier(S::kStages + stage); }
  __device__ uint32_t turn(int group) const { return barrier(2 * S::kStages + group); }  // to multiply
  __device__ uint32_t y_ready(int group) const { return barrier(2 * S::kStages + kGroups + group); }
  __device__ uint32_t y_emptied() const { return barrier(2 * S::kStages + 2 * kGroups); }

  __device__ void init_barriers() const {
    for (int stage = 0; stage < S::kStages; ++stage) {
      bulk::init_barrier(filled(stage), 1);
      bulk::init_barrier(emptied(stage), kWaves);
    }
    for (int group = 0; group < kGroups; ++group) {
      bulk::init_barrier(turn(group), kWaves);
      bulk::init_barrier(y_ready(group), 1);
    }
    bulk::init_barrier(y_emptied(), kWaves);
    bulk::publish_barriers();
  }
};

// Copies the operands of all tiles, in one thread.
template <int kColumns>
__device__ void load_operands(const Lds<kColumns>& lds, const bulk::Matrix& x, const bulk::Matrix& filters,
                              const Tiles& tiles) {
  bulk::Ring<Sizes<kColumns>::kStages> ring;
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const Tile tile(tiles, index, kColumns);
    for (int step = tile.step; step < tile.step + tiles.steps; ++step, ring.next()) {
      const int channel = step / kTaps * kDepth, tap = step % kTaps;
      bulk::wait(lds.emptied(ring.stage), ring.parity ^ 1);
      const uint32_t filled = lds.filled(ring.stage);
      bulk::arrive_expect_bytes(filled, Sizes<kColumns>::kStageBytes);
      bulk::load_pixels(lds.x(ring.stage), x, tile.image, tile.line - 1, tile.column + tap - 1, channel, filled);
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        bulk::load_pixels(lds.filters(ring.stage, i), filters, tile.filter, i, tap, channel, filled);
      }
    }
  }
}

// Lets the groups write to Y's tile in turn, with skip in it if `has_skip`, in one thread.
template <int kColumns>
__device__ void load_skips(const Lds<kColumns>& lds, const bulk::Matrix& skip, bool has_skip, const Tiles& tiles) {
  uint32_t parity = 1;
  int group = 0;
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x, group ^= 1, parity ^= 1) {
    const uint32_t ready = lds.y_ready(group);
    bulk::wait(lds.y_emptied(), parity);
    if (!has_skip) {
      bulk::arrive(ready);
      continue;
    }
    const Tile tile(tiles, index, kColumns);
    bulk::arrive_expect_bytes(ready, Sizes<kColumns>::kYBytes);
    for (int panel = 0; panel < Sizes<kColumns>::kPanels; ++panel) {
      bulk::load_pixels(lds.y(panel), skip, tile.image, tile.line, tile.column,
                        (tile.filter + panel * kPanelColumns) * 2, ready);
    }
  }
}

template <class T>
constexpr bool kIsSplit = std::is_same_v<T, float>;

template <class T>
struct Epilogue {
  const T* bias;
  const float* scale;
  int scale_step;  // 0 for one scale
  int filter_count;
  bool has_skip;
  float* sums;  // (splits, batch, height, width, filter_count)
  int batch, height, width;
};

// Work of a warpgroup that multiplies.
template <class T, int kColumns>
class Group {
  using S = Sizes<kColumns>;

 public:
  __device__ Group(const Lds<kColumns>& lds, char* y_lds, const bulk::Matrix& y, const Epilogue<T>& epilogue,
                   const Tiles& tiles)
      : lds_(lds), y_lds_(y_lds), y_(y), epilogue_(epilogue), tiles_(tiles), wave_(wave_id() % kWaves) {}

  __device__ void run() {
    const int group = wave_id() / kWaves - 1;
    uint32_t parity = 0;
    ring_.skip(group * tiles_.steps);
    for (int index = blockIdx.x + group * gridDim.x; index < tiles_.count; index += kGroups * gridDim.x, parity ^= 1) {
      bulk::wait(lds_.turn(group), parity ^ (group == 0));  // the first group's first turn is at once
      multiply(lds_.turn(1 - group));
      ring_.skip(tiles_.steps);
      const Tile tile(tiles_, index, kColumns);
      if constexpr (kIsSplit<T>) {
        write_sums(tile);
      } else {
        bulk::wait(lds_.y_ready(group), parity);
        write(tile);
      }
    }
    bulk::wait_for_stores();
  }

 private:
  // Multiplies all steps of a tile. The other group's turn comes when this one waits for no stage any more: a barrier
  // tells two phases apart, not more.
  __device__ void multiply(uint32_t next_turn) {
    int last = 0;
    for (int step = 0; step < tiles_.steps; ++step) {
      const int stage = ring_.stage;
      bulk::wait(lds_.filled(stage), ring_.parity);
      wgmma::fence();
      const uint64_t x = wgmma::half_row_descriptor(lds_.x(stage));
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const uint64_t filters = wgmma::half_row_descriptor(lds_.filters(stage, tap));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const int atom = tap + block * kBlockLines, depth = part * wgmma::kFloat8Depth;
            wgmma::multiply_float8(sums_[block], x + (atom * wgmma::kHalfAtomBytes + depth) / 16, filters + depth / 16,
                                   step + tap + part > 0);
          }
        }
      }
      wgmma::commit();
      if (step > 0) {
        wgmma::wait<1>();
        bulk::arrive_wave(lds_.emptied(last));
      }
      last = stage;
      ring_.next();
    }
    bulk::arrive_wave(next_turn);
    wgmma::wait<0>();
    bulk::arrive_wave(lds_.emptied(last));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) wgmma::settle(sums_[block]);
  }

  __device__ void write_sums(const Tile& tile) const {
    const int lane = mma::lane_id();
#pragma unroll
    for (int i = 0; i < kColumns / mma::kTile; ++i) {
#pragma unroll
      for (int element = 0; element < mma::kAccumulatorSize; element += 2) {
        const int filter = tile.filter + i * mma::kTile + mma::accumulator_column(lane, element);
        if (filter >= epilogue_.filter_count) continue;
        const float* const scale = epilogue_.scale + filter * epilogue_.scale_step;
        const float scales[] = {scale[0], scale[epilogue_.scale_step]};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int row = (block * kWaves + wave_) * 16 + mma::accumulator_row(lane, element);
          const int line = tile.line + row / kTileWidth, column = tile.column + row % kTileWidth;
          if (line >= epilogue_.height || column >= epilogue_.width) continue;
          const int image = tile.split * epilogue_.batch + tile.image;
          const int64_t pixel = (static_cast<int64_t>(image) * epilogue_.height + line) * epilogue_.width + column;
          const float values[] = {sums_[block][i].x[element] * scales[0], sums_[block][i].x[element + 1] * scales[1]};
          Vec<float, 2>::pack(values).store(epilogue_.sums + pixel * epilogue_.filter_count + filter);
        }
      }
      wave_barrier();  // as in `write`
    }
  }

  // Writes the pixels of this wave, two lines of each block.
  __device__ void write(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kColumns / mma::kTile; ++i) {
      put<0>(tile, i);
      wave_barrier();  // keeps loads of later columns, which take registers, behind
      put<4>(tile, i);
      wave_barrier();
    }
    wgmma::fence_stores();
    wave_barrier();
    if (mma::lane_id() == 0) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int line = block * kBlockLines + wave_ * kWaveLines;
        for (int panel = 0; panel < S::kPanels; ++panel) {
          bulk::store_pixels(y_, tile.image, tile.line + line, tile.column, (tile.filter + panel * kPanelColumns) * 2,
                             lds_.y(panel) + line * wgmma::kHalfAtomBytes);
        }
      }
      bulk::commit_stores();
      bulk::wait_for_reads();
      bulk::arrive(lds_.y_emptied());
    }
  }

  // Adds to the tile of Y four elements of accumulator i of each block, two adjacent columns in two rows.
  template <int kElement>
  __device__ void put(const Tile& tile, int i) const {
    const int lane = mma::lane_id(), column = i * mma::kTile + mma::accumulator_column(lane, kElement);
    const int filter = min(tile.filter + column, epilogue_.filter_count - 2);
    const float* const scale = epilogue_.scale + filter * epilogue_.scale_step;
    const float scales[] = {scale[0], scale[epilogue_.scale_step]};
    float bias[2];
    Vec<T, 2>::load(epilogue_.bias + filter).unpack(bias);
    char* const panel = y_lds_ + column / kPanelColumns * kPanelBytes;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int element = kElement; element < kElement + 4; element += 2) {
        const int row = (block * kWaves + wave_) * 16 + mma::accumulator_row(lane, element);
        const uint32_t piece = column % kPanelColumns / 8;
        T* const to = reinterpret_cast<T*>(panel + wgmma::half_piece_offset(row, piece)) + column % 8;
        float values[] = {sums_[block][i].x[element] * scales[0] + bias[0],
                          sums_[block][i].x[element + 1] * scales[1] + bias[1]};
        if (epilogue_.has_skip) {
          float skip[2];
          Vec<T, 2>::load(to).unpack(skip);
          values[0] += skip[0], values[1] += skip[1];
        }
        Vec<T, 2>::pack(values).store(to);
      }
    }
  }

  const Lds<kColumns>& lds_;
  char* const y_lds_;
  const bulk::Matrix& y_;
  const Epilogue<T>& epilogue_;
  const Tiles& tiles_;
  const int wave_;
  mma::Accumulator sums_[kBlocks][kColumns / mma::kTile];
  bulk::Ring<S::kStages> ring_;
};

}  // namespace

template <class T, int kColumns>
__global__ __launch_bounds__(kThreads, 1) void quantized_nhwc_conv_kernel(const __grid_constant__ bulk::Matrix x,
                                                                          const __grid_constant__ bulk::Matrix filters,
                                                                          const __grid_constant__ bulk::Matrix skip,
                                                                          const __grid_constant__ bulk::Matrix y,
                                                                          Epilogue<T> epilogue, Tiles tiles) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  SD_ORT_DYNAMIC_LDS(char, dynamic);
  const Lds<kColumns> lds = {wgmma::address_of(dynamic)};
  if (threadIdx.x == 0) lds.init_barriers();
  block_barrier();
  if (threadIdx.x < wgmma::kThreads) {
    wgmma::give_registers_but<40>();
    if (threadIdx.x == 0) load_operands<kColumns>(lds, x, filters, tiles);
    if (!kIsSplit<T> && threadIdx.x == mma::kWave) {
      load_skips<kColumns>(lds, skip, epilogue.has_skip, tiles);
    }
  } else {
    wgmma::take_registers<232>();
    Group<T, kColumns>(lds, dynamic + Sizes<kColumns>::kYAt, y, epilogue, tiles).run();
  }
#endif
}

namespace {

constexpr int64_t kMinSteps = 5;  // of a split

int64_t tiles_across(const QuantizedNhwcConvParams& p) { return ceil_div(p.width, kTileWidth); }
int64_t tiles_down(const QuantizedNhwcConvParams& p) { return ceil_div(p.height, kTileHeight); }
int64_t tile_count(const QuantizedNhwcConvParams& p, int columns) {
  return p.batch * tiles_across(p) * tiles_down(p) * ceil_div(p.filter_count, columns);
}
int64_t steps(const QuantizedNhwcConvParams& p) { return ceil_div(p.channels, kDepth) * kTaps; }

template <class T, int kColumns>
const char* run(const QuantizedNhwcConvParams& p, int64_t splits, float* sums, void* stream) {
  bulk::Matrix x, filters, skip = {}, y;
  const int64_t y_shape[] = {p.batch, p.height, p.width, 2 * p.filter_count};
  if (!bulk::describe_pixels(&x, p.x, {p.batch, p.height, p.width, p.channels},
                             {1, kTileHeight + kTaps - 1, kTileWidth}) ||
      !bulk::describe_pixels(&filters, p.filters, {p.filter_count, kTaps, kTaps, p.channels}, {kColumns, 1, 1}) ||
      !(p.skip == nullptr || bulk::describe_pixels(&skip, p.skip, y_shape, {1, kTileHeight, kTileWidth})) ||
      !bulk::describe_pixels(&y, p.y, y_shape, {1, kWaveLines, kTileWidth})) {
    return "the driver does not describe the images";
  }
  const int64_t count = tile_count(p, kColumns);
  const Tiles tiles = {
      static_cast<int>(ceil_div(steps(p), splits)), static_cast<int>(splits * count), Divisor(count),
      Divisor(ceil_div(p.filter_count, kColumns)),  Divisor(tiles_across(p)),         Divisor(tiles_down(p))};
  const Epilogue<T> epilogue = {static_cast<const T*>(p.bias),
                                p.scale,
                                p.scales == 1 ? 0 : 1,
                                static_cast<int>(p.filter_count),
                                p.skip != nullptr,
                                sums,
                                static_cast<int>(p.batch),
                                static_cast<int>(p.height),
                                static_cast<int>(p.width)};
  return launch(quantized_nhwc_conv_kernel<T, kColumns>, dim3(std::min(tiles.count, multiprocessors())), dim3(kThreads),
                Sizes<kColumns>::kLdsBytes, stream, x, filters, skip, y, epilogue, tiles);
}

template <class T>
const char* run(const QuantizedNhwcConvParams& p, int columns, int64_t splits, float* sums, void* stream) {
  return columns == 160 ? run<T, 160>(p, splits, sums, stream) : run<T, 128>(p, splits, sums, stream);
}

}  // namespace

bool quantized_nhwc_conv_supports_warpgroups(const QuantizedNhwcConvParams& p, int columns) {
  const int64_t count = tile_count(p, columns);
  return wgmma::are_compiled() && p.dtype != DType::kFloat32 && count > 0 && p.channels > 0 && p.channels % 16 == 0 &&
         p.filter_count % 8 == 0 &&
         std::max({p.batch * p.height, p.width, p.inner(), p.filter_count, count}) < INT32_MAX / 2 &&
         are_aligned<16>(p.x, p.filters, p.bias, p.skip, p.y);
}

int64_t quantized_nhwc_conv_splits(const QuantizedNhwcConvParams& p, int columns) {
  const int64_t most = std::min(multiprocessors() / tile_count(p, columns), steps(p) / kMinSteps);
  return most < 2 ? 1 : ceil_div(steps(p), ceil_div(steps(p), most));
}

const char* quantized_nhwc_conv_warpgroups(const QuantizedNhwcConvParams& p, int columns, void* stream) {
  return p.dtype == DType::kFloat16 ? run<half_t>(p, columns, 1, nullptr, stream)
                                    : run<bf16_t>(p, columns, 1, nullptr, stream);
}

const char* quantized_nhwc_conv_split_warpgroups(const QuantizedNhwcConvParams& p, int columns, int64_t splits,
                                                 float* sums, void* stream) {
  return run<float>(p, columns, splits, sums, stream);
}

#endif
}  // namespace sd_ort
