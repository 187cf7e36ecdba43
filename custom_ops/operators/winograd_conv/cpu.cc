// WinogradConv on the CPU: minimal filtering F(4x4, 3x3), after Lavin and Gray, "Fast Algorithms for Convolutional
// Neural Networks" (2016): 36 multiplications instead of 144 of a direct convolution.
//
//   Y = At [ (G w Gt) * (Bt x B) ] A     for tiles of 4 x 4 results, which read 6 x 6 pixels
//
// The transforms evaluate polynomials at 0, +-5/8, +-3/2 and infinity, the most accurate symmetric set of short
// fractions: its relative float32 error is 3 times that of a direct sum, half that of the usual 0, +-1, +-2.
//
// A block is a number of tile rows whose transformed pixels fit the last-level cache. Each task computes a panel of
// output channels for a block: it transforms some filters into its own cache, multiplies, and continues with the next
// input channels. Filters are transformed in every call: transformed they are 4 times as large, so that reading them
// would take longer than computing them, and would cost memory.
#include "common/cpu.h"

#include "operators/winograd_conv/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

// Vectors per panel of output channels, and tiles multiplied at a time: the accumulators and operands fill the
// registers.
#if defined(__AVX512F__)
constexpr int64_t kVectors = 2, kTiles = 12;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int64_t kVectors = 2, kTiles = 6;
#else
constexpr int64_t kVectors = 1, kTiles = 6;
#endif

constexpr int64_t kPanel = kVectors * kLanes;  // output channels per task
constexpr int64_t kDepth = 64;                 // input channels whose filters are transformed at a time
constexpr int64_t kBlock = 128;                // approximate number of tiles per block
constexpr int64_t kOut = 4, kIn = 6;           // edges of a tile
constexpr int64_t kPositions = kIn * kIn;
constexpr int64_t kPad = 16;  // floats between the matrices of positions, to avoid cache conflicts

constexpr float kA = 5.f / 8, kB = 3.f / 2;  // evaluation points
constexpr float kA2 = kA * kA, kB2 = kB * kB;

int64_t round_up(int64_t count, int64_t multiple) { return ceil_div(count, multiple) * multiple; }

// ---- transforms of one row or column; transform_output applies the rest of 1/f_i, f_i = prod (p_i - p_j)

void transform_input(const Floats (&x)[kIn], Floats (&to)[kIn]) {
  const Floats even_a = x[4] - kB2 * x[2], odd_a = kA * (x[3] - kB2 * x[1]);
  const Floats even_b = x[4] - kA2 * x[2], odd_b = kB * (x[3] - kA2 * x[1]);
  to[0] = x[4] - (kA2 + kB2) * x[2] + (kA2 * kB2) * x[0];
  to[1] = even_a + odd_a;
  to[2] = even_a - odd_a;
  to[3] = even_b + odd_b;
  to[4] = even_b - odd_b;
  to[5] = x[5] - (kA2 + kB2) * x[3] + (kA2 * kB2) * x[1];
}

void transform_filter(Floats w0, Floats w1, Floats w2, Floats (&to)[kIn]) {
  const Floats even_a = w0 + kA2 * w2, even_b = w0 + kB2 * w2;
  to[0] = w0;
  to[1] = even_a + kA * w1;
  to[2] = even_a - kA * w1;
  to[3] = even_b + kB * w1;
  to[4] = even_b - kB * w1;
  to[5] = w2;
}

void transform_output(const Floats (&s)[kIn], Floats (&to)[kOut]) {
  constexpr float f0 = 1 / (kA2 * kB2), fa = 1 / (2 * kA2 * (kA2 - kB2)), fb = 1 / (2 * kB2 * (kB2 - kA2));
  const Floats even_a = s[1] + s[2], odd_a = s[1] - s[2];
  const Floats even_b = s[3] + s[4], odd_b = s[3] - s[4];
  to[0] = f0 * s[0] + fa * even_a + fb * even_b;
  to[1] = (fa * kA) * odd_a + (fb * kB) * odd_b;
  to[2] = (fa * kA2) * even_a + (fb * kB2) * even_b;
  to[3] = (fa * kA2 * kA) * odd_a + (fb * kB2 * kB) * odd_b + s[5];
}

// ---- multiplication

// sums[tile * kPanel + channel] (+)= sum over depth of filters[depth * kPanel + channel] * pixels[tile, depth], the
// pixels in groups of kLanes depths: [depth / kLanes][tile][depth % kLanes].
template <int64_t kCount>
void multiply_tiles(const float* filters, const float* pixels, int64_t depth, bool accumulate, float* sums) {
  Floats sum[kCount][kVectors];
#pragma GCC unroll 12
  for (int64_t i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[i][v] = accumulate ? load(sums + i * kPanel + v * kLanes) : Floats{};
    }
  }
  for (int64_t group = 0; group < depth; group += kLanes, pixels += (kCount - 1) * kLanes) {
    for (int64_t d = 0; d < kLanes; ++d, filters += kPanel, ++pixels) {
      Floats filter[kVectors];
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) filter[v] = load(filters + v * kLanes);
#pragma GCC unroll 12
      for (int64_t i = 0; i < kCount; ++i) {
        const float pixel = pixels[i * kLanes];
#pragma GCC unroll 2
        for (int64_t v = 0; v < kVectors; ++v) sum[i][v] += filter[v] * pixel;
      }
    }
  }
#pragma GCC unroll 12
  for (int64_t i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) store(sums + i * kPanel + v * kLanes, sum[i][v]);
  }
}

template <int64_t kCount = kTiles>
void multiply(int64_t tiles, const float* filters, const float* pixels, int64_t depth, bool accumulate, float* sums) {
  if (tiles == kCount) return multiply_tiles<kCount>(filters, pixels, depth, accumulate, sums);
  if constexpr (kCount > 1) return multiply<kCount - 1>(tiles, filters, pixels, depth, accumulate, sums);
}

template <class T>
Eight load_up_to(const T* from, int64_t count) {
  return count >= 8 ? load_eight(from) : load_some<Eight>(from, count);
}

template <class T>
class Convolution {
 public:
  explicit Convolution(const WinogradConvParams& params)
      : p(params),
        x(static_cast<const T*>(p.x)),
        filters(static_cast<const T*>(p.filters)),
        bias(static_cast<const T*>(p.bias)),
        y(static_cast<T*>(p.y)),
        tiles_across(ceil_div(p.width, kOut)),
        tiles_down(ceil_div(p.height, kOut)),
        channels(round_up(p.channels, kLanes)) {}

  void run(const Parallel& parallel) const {
    if (p.batch == 0 || p.filter_count == 0 || p.height == 0 || p.width == 0) return;
    const int64_t rows = p.batch * tiles_down;
    const int64_t rows_at_once = kBlock < tiles_across ? 1 : kBlock / tiles_across;
    const int64_t blocks = ceil_div(rows, rows_at_once);
    const int64_t depths = ceil_div(channels, kDepth), panels = ceil_div(p.filter_count, kPanel);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * rows / blocks;
      Block block{first, (b + 1) * rows / blocks - first, nullptr};
      static thread_local ThreadScratch<float> pixels;
      block.pixels = pixels.get(depths * kPositions * stride(block, kDepth));
      parallel(block.rows * depths, [&](size_t task) {
        read_tiles(block, first + int64_t(task) / depths, int64_t(task) % depths * kDepth);
      });
      parallel(panels, [&](size_t task) { make_panel(block, int64_t(task) * kPanel); });
    }
  }

 private:
  // Rows of tiles over all images, and their transformed pixels by kDepth channels:
  // [position][tile / kTiles][channel / kLanes][tile % kTiles][channel % kLanes].
  struct Block {
    int64_t first;
    int64_t rows;
    float* pixels;
  };

  int64_t tiles_of(const Block& block) const { return block.rows * tiles_across; }
  // Floats between positions for `depth` channels.
  int64_t stride(const Block& block, int64_t depth) const { return tiles_of(block) * depth + kPad; }
  int64_t depth_from(int64_t channel) const { return channels - channel < kDepth ? channels - channel : kDepth; }
  float* pixels_of(const Block& block, int64_t channel) const {
    return block.pixels + channel / kDepth * kPositions * stride(block, kDepth);
  }

  // Transforms the pixels of one row of tiles, kDepth channels starting at `channel`.
  void read_tiles(const Block& block, int64_t row, int64_t channel) const {
    static thread_local ThreadScratch<float> scratch;
    const int64_t columns = tiles_across * kOut + 2;  // including the padding
    const int64_t depth = depth_from(channel), tiles = tiles_of(block);
    float* lines = scratch.get(kIn * columns * kLanes);
    float* to = pixels_of(block, channel);
    for (int64_t c = 0; c < depth; c += kLanes) {
      gather(row / tiles_down, channel + c, row % tiles_down * kOut - 1, lines, columns);
      for (int64_t tile = 0; tile < tiles_across; ++tile) {
        const int64_t at = (row - block.first) * tiles_across + tile;
        const int64_t start = at / kTiles * kTiles;
        const int64_t together = tiles - start < kTiles ? tiles - start : kTiles;
        float* position = to + start * depth + (c * together) + (at - start) * kLanes;
        for (int64_t i = 0; i < kIn; ++i) {
          Floats line[kIn], transformed[kIn];
          for (int64_t j = 0; j < kIn; ++j) line[j] = load(lines + (i * columns + tile * kOut + j) * kLanes);
          transform_input(line, transformed);
          for (int64_t j = 0; j < kIn; ++j, position += stride(block, depth)) store(position, transformed[j]);
        }
      }
    }
  }

  // Loads six lines of pixels, starting at line `top` and column -1 of an image, kLanes channels at a time, zeros
  // outside, and transforms each column.
  void gather(int64_t image, int64_t channel, int64_t top, float* lines, int64_t columns) const {
    memset(lines, 0, kIn * columns * kLanes * sizeof(float));
    for (int64_t i = 0; i < kIn; ++i) {
      if (top + i < 0 || top + i >= p.height) continue;
      for (int64_t c = 0; c < kLanes; c += 8) {
        for (int64_t column = 0; column < p.width; column += 8) {
          const int64_t count = p.width - column < 8 ? p.width - column : 8;
          Eight rows[8];
          for (int64_t k = 0; k < 8; ++k) {
            const int64_t plane = channel + c + k;
            const T* from = x + ((image * p.channels + plane) * p.height + top + i) * p.width + column;
            rows[k] = plane < p.channels ? load_up_to(from, count) : Eight{};
          }
          transpose_8x8(rows);
          for (int64_t k = 0; k < count; ++k) store_eight(lines + (i * columns + 1 + column + k) * kLanes + c, rows[k]);
        }
      }
    }
    for (int64_t column = 0; column < columns; ++column) {
      Floats down[kIn], transformed[kIn];
      for (int64_t i = 0; i < kIn; ++i) down[i] = load(lines + (i * columns + column) * kLanes);
      transform_input(down, transformed);
      for (int64_t i = 0; i < kIn; ++i) store(lines + (i * columns + column) * kLanes, transformed[i]);
    }
  }

  // Computes kPanel output channels of a block, starting at `filter`.
  void make_panel(const Block& block, int64_t filter) const {
    static thread_local ThreadScratch<float> scratch;
    constexpr int64_t panel_stride = kDepth * kPanel + kPad;
    const int64_t tiles = tiles_of(block), sums_stride = stride(block, kPanel);
    float* panel = scratch.get(kPositions * (panel_stride + sums_stride));
    float* sums = panel + kPositions * panel_stride;
    if (channels == 0) memset(sums, 0, kPositions * sums_stride * sizeof(float));
    for (int64_t channel = 0; channel < channels; channel += kDepth) {
      const int64_t depth = depth_from(channel);
      transform_filters(filter, channel, depth, panel, panel_stride);
      for (int64_t position = 0; position < kPositions; ++position) {
        const float* pixels = pixels_of(block, channel) + position * stride(block, depth);
        prefetch_filters(filter, channel + depth, position);
        for (int64_t tile = 0; tile < tiles; tile += kTiles) {
          multiply(tiles - tile < kTiles ? tiles - tile : kTiles, panel + position * panel_stride,
                   pixels + tile * depth, depth, channel > 0, sums + position * sums_stride + tile * kPanel);
        }
      }
    }
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t v = 0; v < kPanel && filter + v < p.filter_count; v += kLanes) {
        write_tiles(block.first + row, filter + v, sums + row * tiles_across * kPanel + v, sums_stride);
      }
    }
  }

  // Prefetches a cache line of each of the kPanel filters; as many lines as remaining are positions cover kDepth
  // channels.
  void prefetch_filters(int64_t filter, int64_t channel, int64_t line) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (channel * 9 + line * kLine >= p.channels * 9) return;
    for (int64_t m = 0; m < kPanel && filter + m < p.filter_count; ++m) {
      __builtin_prefetch(filters + ((filter + m) * p.channels + channel) * 9 + line * kLine, 0, 2);
    }
  }

  // Transforms filters [filter, filter + kPanel) of channels [channel, channel + depth) to
  // to[position][channel][filter], positions `stride` apart; zeros for missing filters.
  void transform_filters(int64_t filter, int64_t channel, int64_t depth, float* to, int64_t stride) const {
    constexpr int64_t kTaps = 9;
    float taps[8 * kTaps][kPanel];
    for (int64_t c = 0; c < depth; c += 8) {
      const int64_t remaining = (p.channels - channel - c) * kTaps;  // remaining floats of the filter
      for (int64_t m = 0; m < kPanel; m += 8) {
        for (int64_t tap = 0; tap < 8 * kTaps; tap += 8) {
          Eight rows[8];
          for (int64_t k = 0; k < 8; ++k) {
            const T* from = filters + ((filter + m + k) * p.channels + channel + c) * kTaps + tap;
            rows[k] = filter + m + k < p.filter_count && tap < remaining ? load_up_to(from, remaining - tap) : Eight{};
          }
          transpose_8x8(rows);
          for (int64_t k = 0; k < 8; ++k) store_eight(&taps[tap + k][m], rows[k]);
        }
      }
      for (int64_t k = 0; k < 8; ++k) {
        for (int64_t v = 0; v < kPanel; v += kLanes) {
          transform_filter_at(&taps[k * kTaps][v], to + (c + k) * kPanel + v, stride);
        }
      }
    }
  }

  static void transform_filter_at(const float* taps, float* to, int64_t stride) {
    Floats lines[3][kIn];
    for (int64_t i = 0; i < 3; ++i) {
      const float* tap = taps + i * kPanel;
      transform_filter(load(tap), load(tap + 3 * kPanel), load(tap + 6 * kPanel), lines[i]);
    }
    for (int64_t i = 0; i < kIn; ++i) {
      Floats transformed[kIn];
      transform_filter(lines[0][i], lines[1][i], lines[2][i], transformed);
      for (int64_t j = 0; j < kIn; ++j, to += stride) store(to, transformed[j]);
    }
  }

  // Writes one row of tiles, kLanes output channels starting at `filter`, from sums[position][tile][channel].
  void write_tiles(int64_t row, int64_t filter, const float* sums, int64_t stride) const {
    static thread_local ThreadScratch<float> scratch;
    const int64_t columns = round_up(tiles_across * kOut, 8);
    float* lines = scratch.get(kOut * columns * kLanes);
    float biases[kLanes] = {};
    for (int64_t m = 0; m < kLanes && filter + m < p.filter_count; ++m) biases[m] = to_float(bias[filter + m]);
    for (int64_t tile = 0; tile < tiles_across; ++tile, sums += kPanel) {
      Floats down[kOut][kIn];
      for (int64_t j = 0; j < kIn; ++j) {
        Floats column[kIn], transformed[kOut];
        for (int64_t i = 0; i < kIn; ++i) column[i] = load(sums + (i * kIn + j) * stride);
        transform_output(column, transformed);
        for (int64_t i = 0; i < kOut; ++i) down[i][j] = transformed[i];
      }
      for (int64_t i = 0; i < kOut; ++i) {
        Floats transformed[kOut];
        transform_output(down[i], transformed);
        for (int64_t j = 0; j < kOut; ++j) {
          store(lines + (i * columns + tile * kOut + j) * kLanes, transformed[j] + load(biases));
        }
      }
    }
    const int64_t image = row / tiles_down, top = row % tiles_down * kOut;
    for (int64_t i = 0; i < kOut && top + i < p.height; ++i) {
      for (int64_t m = 0; m < kLanes; m += 8) {
        for (int64_t column = 0; column < p.width; column += 8) {
          const int64_t count = p.width - column < 8 ? p.width - column : 8;
          Eight rows[8];
          for (int64_t k = 0; k < 8; ++k) rows[k] = load_eight(lines + (i * columns + column + k) * kLanes + m);
          transpose_8x8(rows);
          for (int64_t k = 0; k < 8 && filter + m + k < p.filter_count; ++k) {
            T* to = y + ((image * p.filter_count + filter + m + k) * p.height + top + i) * p.width + column;
            count == 8 ? store_eight(to, rows[k]) : store_some(to, rows[k], count);
          }
        }
      }
    }
  }

  const WinogradConvParams& p;
  const T* x;
  const T* filters;
  const T* bias;
  T* y;
  int64_t tiles_across;
  int64_t tiles_down;
  int64_t channels;  // padded to full vectors
};

}  // namespace

void winograd_conv(const WinogradConvParams& params, const Parallel& parallel) {
  params.dtype == DType::kFloat32 ? Convolution<float>(params).run(parallel) : Convolution<Half>(params).run(parallel);
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
