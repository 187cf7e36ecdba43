// Bfloat16Conv and QuantizedConv on the CPU: an implicit GEMM with pixels as rows, once per filter tap. The type of the
// sums selects the elements: float for bfloat16, int32 for int8.
//
// An image is rounded, zero-padded and reordered by pixels: row y (W + 1) + x of its matrix is pixel (y - 1, x - 1);
// the zero right of a line is that left of the next one. For result (y, x), in the same row numbering, tap (i, j) reads
// row (y + i) (W + 1) + x + j, so the rows of a tap are consecutive; the extra result of each line is computed and not
// written. With stride 2 the padded image is
// divided into four by even and odd lines and columns, and a tap reads one of them.
#include "common/tiles.h"
#include "operators/bfloat16_conv/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kSide = 16;

// Elements of X with sums of type Sum: their type, and channels of a block and of a word of 32 bits.
template <class Sum>
struct Elements {
  using X = float;
  static constexpr int64_t kBlock = kBlockDepth, kWord = 2;
};
template <>
struct Elements<int32_t> {
  using X = int8_t;
  static constexpr int64_t kBlock = 2 * kBlockDepth, kWord = 4;
};

// kLanes elements of a packed image in the lower bits of the lanes.
inline Ints packed_elements(const float* from, int64_t count) {
  return (Ints)((Words)rounded(count >= kLanes ? load(from) : load_some(from, count)) >> 16);
}
inline Ints packed_elements(const int8_t* from, int64_t count) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  Bytes bytes = {};
  memcpy(&bytes, from, count < kLanes ? count : kLanes);
  return __builtin_convertvector(bytes ^ packed_zero(), Ints);
}

inline void pack_row(const float* from, int64_t count, uint16_t* to) { round_row(from, count, to); }
inline void pack_row(const int8_t* from, int64_t count, uint16_t* to) { pack_bytes(from, count > 0 ? count : 0, to); }

struct Frame {
  int64_t stride, pad, lines, columns, width, blocks, row_blocks, part_rows, row_count;

  // `lines` and `columns` of the result; `width` of a part of the padded image.
  explicit Frame(const Bfloat16ConvParams& p)
      : stride(p.stride),
        pad(p.edge / 2),
        lines(ceil_div(p.height, stride)),
        columns(ceil_div(p.width, stride)),
        width(columns + pad),
        blocks(ceil_div(p.channels, p.int8() ? Elements<int32_t>::kBlock : Elements<float>::kBlock)),
        row_blocks(ceil_div(lines * width, kBlockRows)),
        part_rows(row_blocks * kBlockRows + 2 * pad * (width + 1)),
        row_count(part_rows * stride * stride) {}

  int64_t elements() const { return blocks * row_count * kBlockDepth; }  // of an image
  int64_t row(int64_t line, int64_t column) const {                      // row of a pixel of the padded image
    return (line % stride * stride + column % stride) * part_rows + line / stride * width + column / stride;
  }
};

// Packs a block of channels of a channels-last image, starting at `channel`.
template <class Sum>
void pack_rows(const Bfloat16ConvParams& p, const Frame& frame, int64_t image, int64_t channel, uint16_t* to) {
  const int64_t pixels = p.height * p.width;
  const auto* x = static_cast<const typename Elements<Sum>::X*>(p.x) + image * pixels * p.channels + channel;
  for (int64_t i = 0; i < frame.row_count; ++i, to += kBlockDepth) {
    pack_row(i < pixels ? x + i * p.channels : x, i < pixels ? p.channels - channel : 0, to);
  }
}

// Packs a block of channels of a channels-first image, starting at `channel`.
template <class Sum>
void pack_pixels(const Bfloat16ConvParams& p, const Frame& frame, int64_t image, int64_t channel, uint16_t* to) {
  using Each = Elements<Sum>;
  memset(to, Each::kWord == 4 ? packed_zero() : 0, frame.row_count * kBlockDepth * sizeof(uint16_t));
  const int64_t plane = p.height * p.width;
  const auto* x = static_cast<const typename Each::X*>(p.x) + (image * p.channels + channel) * plane;
  const int64_t channels = p.channels - channel < Each::kBlock ? p.channels - channel : Each::kBlock;
  alignas(64) uint32_t words[kSide * kSide] = {}, rows[kSide * kSide];  // [word of channels][pixel], and back
  for (int64_t line = 0; line < p.height; ++line) {
    for (int64_t column = 0; column < p.width; column += kSide) {
      const int64_t count = p.width - column < kSide ? p.width - column : kSide;
      for (int64_t c = 0; c < channels; ++c) {
        const auto* from = x + c * plane + line * p.width + column;
        const int64_t place = c % Each::kWord;
        for (int64_t i = 0; i < count; i += kLanes) {
          uint32_t* at = words + c / Each::kWord * kSide + i;
          Ints word = packed_elements(from + i, count - i) << static_cast<int32_t>(place * 32 / Each::kWord);
          if (place > 0) {
            Ints before;
            memcpy(&before, at, sizeof(before));
            word |= before;
          }
          memcpy(at, &word, sizeof(word));
        }
      }
      transpose_16(words, kSide, rows, kSide);
      if (frame.stride == 1) {
        uint16_t* start = to + frame.row(line + frame.pad, column + frame.pad) * kBlockDepth;
        memcpy(start, rows, count * kBlockDepth * sizeof(uint16_t));
      } else {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = frame.row(line + frame.pad, column + i + frame.pad);
          memcpy(to + row * kBlockDepth, rows + i * kSide, kBlockDepth * sizeof(uint16_t));
        }
      }
    }
  }
}

// Range of a block's 32 rows inside the image: `count` results starting at row `row` of the block, at offset `at`.
struct Run {
  int64_t row, count, at;
};

int64_t find_runs(const Frame& frame, int64_t first, Run (&runs)[kBlockRows]) {
  int64_t found = 0;
  for (int64_t row = 0; row < kBlockRows;) {
    const int64_t line = (first + row) / frame.width, column = (first + row) % frame.width;
    const int64_t left = frame.width - column < kBlockRows - row ? frame.width - column : kBlockRows - row;
    const int64_t inside = frame.columns - column < left ? frame.columns - column : left;
    if (line < frame.lines && inside > 0) runs[found++] = {row, inside, line * frame.columns + column};
    row += left;
  }
  return found;
}

// Only sums of int8 have scales.
inline float scaled(float sum, float) { return sum; }
inline Floats scaled(Floats sum, Floats) { return sum; }
inline float scaled(int32_t sum, float scale) { return static_cast<float>(sum) * scale; }
inline Floats scaled(Ints sum, Floats scale) { return __builtin_convertvector(sum, Floats) * scale; }

template <class Sum>
void write(const Bfloat16ConvParams& p, const Frame& frame, int64_t image, int64_t first, int64_t filter,
           const Sum* sums) {
  alignas(64) Sum columns[kBlockColumns * kBlockRows];
  for (int64_t i = 0; i < kBlockColumns; i += kSide) {
    for (int64_t j = 0; j < kBlockRows; j += kSide) {
      transpose_16(sums + j * kBlockColumns + i, kBlockColumns, columns + i * kBlockRows + j, kBlockRows);
    }
  }
  Run runs[kBlockRows];
  const int64_t found = find_runs(frame, first, runs), plane = frame.lines * frame.columns;
  const int64_t filters = p.filter_count - filter < kBlockColumns ? p.filter_count - filter : kBlockColumns;
  for (int64_t f = 0; f < filters; ++f) {
    const float bias = p.bias == nullptr ? 0.f : static_cast<const float*>(p.bias)[filter + f];
    const float scale = p.scale == nullptr ? 1.f : p.scale[p.scales == 1 ? 0 : filter + f];
    float* y = static_cast<float*>(p.y) + (image * p.filter_count + filter + f) * plane;
    for (int64_t r = 0; r < found; ++r) {
      const Sum* from = columns + f * kBlockRows + runs[r].row;
      float* to = y + runs[r].at;
      for (int64_t i = 0; i < runs[r].count; ++i) to[i] = scaled(from[i], scale) + bias;
    }
  }
}

// Writes a channels-last result.
template <class Sum>
void write_rows(const Bfloat16ConvParams& p, const Frame& frame, int64_t image, int64_t first, int64_t filter,
                const Sum* sums) {
  const int64_t pixels = frame.lines * frame.columns, rows = pixels - first < kBlockRows ? pixels - first : kBlockRows;
  for (int64_t part = 0; part < kBlockColumns && filter + part < p.filter_count; part += kLanes) {
    const int64_t left = p.filter_count - filter - part;
    const float* bias = static_cast<const float*>(p.bias) + filter + part;
    const Floats added = p.bias == nullptr ? splat(0.f) : left >= kLanes ? load(bias) : load_some(bias, left);
    const float* scales = p.scale + filter + part;
    const Floats scale = p.scale == nullptr ? splat(1.f)
                         : p.scales == 1    ? splat(*p.scale)
                         : left >= kLanes   ? load(scales)
                                            : load_some(scales, left);
    float* y = static_cast<float*>(p.y) + (image * pixels + first) * p.filter_count + filter + part;
    for (int64_t r = 0; r < rows; ++r, y += p.filter_count) {
      store_up_to(y, scaled(load(sums + r * kBlockColumns + part), scale) + added, left);
    }
  }
}

template <class Sum>
void convolve(const Bfloat16ConvParams& p, const Parallel& parallel) {
  static thread_local ThreadScratch<uint16_t> scratch;
  const Frame frame(p);
  uint16_t* rows = scratch.get(p.batch * frame.elements());
  if (frame.blocks > 0)
    parallel(p.batch * frame.blocks, [&](size_t task) {
      const int64_t image = static_cast<int64_t>(task) / frame.blocks,
                    block = static_cast<int64_t>(task) % frame.blocks;
      const auto pack = p.x_last ? pack_rows<Sum> : pack_pixels<Sum>;
      pack(p, frame, image, block * Elements<Sum>::kBlock,
           rows + image * frame.elements() + block * frame.row_count * kBlockDepth);
    });
  const Tasks tasks(p.batch * frame.row_blocks * kBlockRows, 2 * ceil_div(p.filter_count, kBlockColumns));
  parallel(tasks.count(), [&](size_t task) {
    const TileScope tiles;
    alignas(64) Sum sums[kBlockRows * kBlockColumns];
    GemmBlock gemm = {nullptr, p.packed, frame.row_count * kBlockDepth, kBlockDepth, frame.blocks, p.edge * p.edge, {}};
    gemm.offsets = packed_offsets(p.packed, 2 * tasks.pairs, gemm.taps, frame.blocks);
    for (int64_t tap = 0; tap < gemm.taps; ++tap) gemm.first[tap] = frame.row(tap / p.edge, tap % p.edge);
    tasks.run(static_cast<int64_t>(task), false, [&](int64_t block, int64_t panel) {
      const int64_t image = block / frame.row_blocks, first = block % frame.row_blocks * kBlockRows;
      gemm.rows = rows + image * frame.elements();
      const int64_t left = frame.lines * frame.width - first;
      multiply_block(gemm, first, panel, sums, left < kBlockRows ? left : kBlockRows);
      (p.y_last ? write_rows<Sum> : write<Sum>)(p, frame, image, first, panel * kPanelColumns, sums);
    });
  });
}

}  // namespace

void bfloat16_conv(const Bfloat16ConvParams& p, const Parallel& parallel) {
  p.int8() ? convolve<int32_t>(p, parallel) : convolve<float>(p, parallel);
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
