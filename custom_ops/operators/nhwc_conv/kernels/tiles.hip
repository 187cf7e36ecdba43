// NhwcConv for fp16, bf16 and pairs of float8 as an implicit GEMM by matrix instructions: pixels of Y by filters,
// summed over the taps and channels of the window ("depth"), which are contiguous in a filter and, per tap, in X. No
// window is written to memory.
//
// nhwc_conv_tiles_kernel<T, Y, kVec, kMatrix>
//   A block computes kPixels pixels and kFilters filters in depth steps of kDepth. With several splits each block
//   computes a part of the depth and writes float32 sums. X and filters are T, all else is Y; a pair of float8 numbers
//   is one channel, and its sums are scaled. kVec is 8 if the channel count is a multiple of 8, else 1. With kMatrix
//   the filters are a matrix (depth, filters), which is transposed on its way to LDS; kVec also needs a multiple of 8
//   filters.
//   Launch: block (256, 1, 1), grid (ceil(pixels / 128), ceil(filter_count / 64), splits), no dynamic LDS.
// nhwc_conv_sum_kernel<T, kVec>
//   Adds the sums of the splits, bias and skip, and applies the activation. A thread has kVec adjacent filters, which
//   divides their number. Launch: block (256, 1, 1), grid (ceil(elements / (256 * kVec)), 1, 1).
#include <type_traits>

#include "common/gpu.h"
#include "common/math.h"
#include "common/mma.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {
namespace {

constexpr int kThreads = 256;
constexpr int kPixels = NhwcConvTiles::kPixels;
constexpr int kFilters = NhwcConvTiles::kFilters;
constexpr int kDepth = NhwcConvTiles::kDepth;
constexpr int kStride = kDepth + mma::kPadding;        // row stride in LDS
constexpr int kLanesPerRow = kDepth / 8;               // lanes per row, each with 8 elements
constexpr int kRowsPerStep = kThreads / kLanesPerRow;  // rows that the block loads at a time
constexpr int kPixelSteps = kPixels / kRowsPerStep;
constexpr int kFilterSteps = kFilters / kRowsPerStep;
static_assert(kPixels % kRowsPerStep == 0 && kFilters % kRowsPerStep == 0, "every thread loads as much as every other");

// 8 elements of any type.
struct Eight {
  uint32_t bits[4];
};

// Position in the depth: a tap of the window and a channel.
struct Place {
  int row, column, channel;

  __device__ Place(const NhwcConvShape& s, int depth) {
    const uint32_t tap = static_cast<uint32_t>(depth) / static_cast<uint32_t>(s.channels);
    channel = depth - static_cast<int>(tap) * s.channels;
    row = static_cast<int>(tap / static_cast<uint32_t>(s.kernel_width));
    column = static_cast<int>(tap) - row * s.kernel_width;
  }
  __device__ void advance(const NhwcConvShape& s, int by) {
    channel += by;
    while (channel >= s.channels) {
      channel -= s.channels;
      if (++column == s.kernel_width) {
        column = 0;
        ++row;
      }
    }
  }
};

// The window of one pixel of Y.
template <class T>
struct Window {
  const T* image;
  int row, column;  // of the first tap in X
  bool exists;

  __device__ Window(const T* x, const NhwcConvShape& s, int pixel, int pixels) {
    exists = pixel < pixels;
    const uint32_t at = exists ? pixel : 0, width = s.out_width, height = s.out_height;
    const uint32_t line = at / width, sample = line / height;
    image = x + static_cast<int64_t>(sample) * s.height * s.width * s.channels;
    row = static_cast<int>(line - sample * height) * s.stride_height - s.pad_top;
    column = static_cast<int>(at - line * width) * s.stride_width - s.pad_left;
  }

  // Returns the offset of the element at a position and sets `valid`; the first element of the image if it is outside.
  __device__ const T* at(const NhwcConvShape& s, const Place& place, bool& valid) const {
    const int from_row = row + place.row * s.dilation_height, from_column = column + place.column * s.dilation_width;
    valid = valid && exists && static_cast<uint32_t>(from_row) < static_cast<uint32_t>(s.height) &&
            static_cast<uint32_t>(from_column) < static_cast<uint32_t>(s.width);
    return image + (valid ? (from_row * s.width + from_column) * s.channels + place.channel : 0);
  }
};

// Loads 8 adjacent elements, zeros if not valid, without a branch that would delay other loads.
template <class T>
__device__ inline Eight load_eight(const T* from, bool valid) {
  Eight eight;
  const auto loaded = Vec<T, 8>::load(from);
  memcpy(eight.bits, &loaded.raw, sizeof(eight.bits));
  const uint32_t mask = valid ? 0xffffffffu : 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) eight.bits[i] &= mask;
  return eight;
}

template <class T>
__device__ inline uint32_t load_one(const T* from, bool valid) {
  uint16_t bits;
  memcpy(&bits, from, sizeof(bits));
  return valid ? bits : 0u;
}

template <class T>
__device__ inline void store_eight(const Eight& eight, T* to) {
  // nvcc 13 miscompiles other pointer types here.
  void* const place = to;
  memcpy(__builtin_assume_aligned(place, mma::kPadding * sizeof(T)), eight.bits, sizeof(eight.bits));
}

// Loads 8 elements of a pixel's window starting at `depth`, whose position is `place`.
template <int kVec, class T>
__device__ inline Eight load_window(const Window<T>& window, const NhwcConvShape& s, Place place, int depth, int end) {
  if constexpr (kVec == 8) {
    bool valid = depth < end;
    const T* from = window.at(s, place, valid);
    return load_eight(from, valid);
  } else {
    Eight eight{};
    for (int i = 0; i < 8; ++i, place.advance(s, 1)) {
      bool valid = depth + i < end;
      const T* from = window.at(s, place, valid);
      eight.bits[i / 2] |= load_one(from, valid) << (16 * (i % 2));
    }
    return eight;
  }
}

// Loads 8 elements of a row (a filter, or a row of a product) starting at `depth`; zeros beyond the last row or depth.
template <int kVec, class T>
__device__ inline Eight load_row(const T* matrix, int row, int rows, int depth, int end, int full_depth) {
  const bool exists = row < rows;
  const int first = exists ? row * full_depth : 0;
  if constexpr (kVec == 8) {
    const bool valid = exists && depth < end;
    return load_eight(matrix + (valid ? first + depth : 0), valid);
  } else {
    Eight eight{};
    for (int i = 0; i < 8; ++i) {
      const bool valid = exists && depth + i < end;
      eight.bits[i / 2] |= load_one(matrix + (valid ? first + depth + i : 0), valid) << (16 * (i % 2));
    }
    return eight;
  }
}

// Loads 8 adjacent columns of a row of a matrix (depth, columns); zeros beyond the last row or column.
template <int kVec, class T>
__device__ inline Eight load_columns(const T* matrix, int column, int columns, int depth, int end) {
  const bool exists = depth < end;
  const int64_t row = exists ? static_cast<int64_t>(depth) * columns : 0;
  if constexpr (kVec == 8) {
    const bool valid = exists && column < columns;
    return load_eight(matrix + (valid ? row + column : 0), valid);
  } else {
    Eight eight{};
    for (int i = 0; i < 8; ++i) {
      const bool valid = exists && column + i < columns;
      eight.bits[i / 2] |= load_one(matrix + (valid ? row + column + i : 0), valid) << (16 * (i % 2));
    }
    return eight;
  }
}

// Column of a matrix that is in row `row` of its tile in LDS. The lanes of a wave store different multiples of 8
// columns at a time: in adjacent rows of LDS these are in different banks.
constexpr int kMatrixLanes = kFilters / 8;  // lanes per depth, each with 8 columns
static_assert(kThreads / kMatrixLanes == kDepth, "the block loads a step of a matrix at a time");
__device__ inline int matrix_column(int row) { return row % kMatrixLanes * 8 + row / kMatrixLanes; }

template <class T>
__device__ inline void store_transposed(const Eight& eight, T* lds, int lane, int depth) {
  T values[8];
  memcpy(values, eight.bits, sizeof(values));
#pragma unroll
  for (int i = 0; i < 8; ++i) lds[(i * kMatrixLanes + lane) * kStride + depth] = values[i];
}

__device__ inline float activate(float sum, NhwcConvActivation activation) {
  if (activation == NhwcConvActivation::kRelu && sum < 0.f) return 0.f;  // keeps NaN
  return activation == NhwcConvActivation::kGelu ? gelu_tanh(sum) : sum;
}

}  // namespace

template <class T, class Y, int kVec, bool kMatrix>
__device__ inline void convolve_tile(const T* x, const T* filters, NhwcConvScale scale, const Y* bias, const Y* skip,
                                     Y* y, float* sums, int32_t pixels, int32_t split_depth, const NhwcConvShape& s) {
  using namespace mma;
  // Waves compute rows of 32 pixels; with 8 waves (of 32 lanes) two share the filters, with 4 (of 64) each has all.
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE, kWaveRows = kPixels / 32;
  constexpr int kRowTiles = 2, kColumnTiles = kFilters / kTile / (kWaves / kWaveRows);
  alignas(16) __shared__ T window_lds[kPixels * kStride];
  alignas(16) __shared__ T filter_lds[kFilters * kStride];

  const int lane_row = threadIdx.x / kLanesPerRow, lane_depth = threadIdx.x % kLanesPerRow * 8;
  const int matrix_lane = threadIdx.x % kMatrixLanes, matrix_depth = threadIdx.x / kMatrixLanes;
  const int first_pixel = blockIdx.x * kPixels, first_filter = blockIdx.y * kFilters;
  const int full_depth = s.kernel_height * s.kernel_width * s.channels;
  const int begin = blockIdx.z * split_depth, end = min(begin + split_depth, full_depth);
  const int wave = threadIdx.x / SD_ORT_WAVE_SIZE;
  const int wave_row = wave % kWaveRows * 32, wave_column = wave / kWaveRows * kColumnTiles * kTile;

  const Window<T> windows[kPixelSteps] = {{x, s, first_pixel + lane_row, pixels},
                                          {x, s, first_pixel + lane_row + kRowsPerStep, pixels}};
  Place place(s, begin + lane_depth);
  Eight window_part[kPixelSteps], filter_part[kFilterSteps];
  const auto load = [&](int depth) {
    if constexpr (kMatrix) {
#pragma unroll
      for (int i = 0; i < kPixelSteps; ++i) {
        window_part[i] = load_row<kVec>(x, first_pixel + lane_row + i * kRowsPerStep, pixels, depth, end, full_depth);
      }
      const int column = first_filter + matrix_lane * 8, row = depth - lane_depth + matrix_depth;
      filter_part[0] = load_columns<kVec>(filters, column, s.filter_count, row, end);
    } else {
#pragma unroll
      for (int i = 0; i < kPixelSteps; ++i) window_part[i] = load_window<kVec>(windows[i], s, place, depth, end);
#pragma unroll
      for (int i = 0; i < kFilterSteps; ++i) {
        const int filter = first_filter + lane_row + i * kRowsPerStep;
        filter_part[i] = load_row<kVec>(filters, filter, s.filter_count, depth, end, full_depth);
      }
      place.advance(s, kDepth);
    }
  };

  Accumulator out[kRowTiles][kColumnTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) zero(out[m][n]);
  }

  load(begin + lane_depth);
  for (int depth = begin; depth < end; depth += kDepth) {
#pragma unroll
    for (int i = 0; i < kPixelSteps; ++i) {
      store_eight(window_part[i], window_lds + (lane_row + i * kRowsPerStep) * kStride + lane_depth);
    }
    if constexpr (kMatrix) {
      store_transposed(filter_part[0], filter_lds, matrix_lane, matrix_depth);
    } else {
#pragma unroll
      for (int i = 0; i < kFilterSteps; ++i) {
        store_eight(filter_part[i], filter_lds + (lane_row + i * kRowsPerStep) * kStride + lane_depth);
      }
    }
    block_barrier();
    if (depth + kDepth < end) load(depth + kDepth + lane_depth);
#pragma unroll
    for (int k = 0; k < kDepth; k += kTile) {
      Operand<T> rows[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        rows[m] = load_operand(window_lds + (wave_row + m * kTile) * kStride + k, kStride);
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const Operand<T> columns = load_operand(filter_lds + (wave_column + n * kTile) * kStride + k, kStride);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) multiply_add(out[m][n], rows[m], columns);
      }
      schedule_barrier();
    }
    block_barrier();
  }

  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) {
        const int pixel = first_pixel + wave_row + m * kTile + accumulator_row(lane, i);
        const int row = wave_column + n * kTile + accumulator_column(lane, i);
        const int filter = first_filter + (kMatrix ? matrix_column(row) : row);
        if (pixel >= pixels || filter >= s.filter_count) continue;
        const int at = pixel * s.filter_count + filter;
        float sum = out[m][n].x[i];
        if constexpr (std::is_same_v<T, float8x2_t>) {
          sum *= scale.factors[filter * scale.step] * kFloat8ProductFactor;
        }
        if (sums != nullptr) {
          sums[static_cast<int64_t>(blockIdx.z) * pixels * s.filter_count + at] = sum;
          continue;
        }
        if (bias != nullptr) sum += to_float(bias[filter]);
        if (skip != nullptr) sum += to_float(skip[at]);
        constexpr bool kMayBeGelu = kMatrix || std::is_same_v<T, float8x2_t>;
        if (kMayBeGelu || s.activation == NhwcConvActivation::kRelu) sum = activate(sum, s.activation);
        y[at] = from_float<Y>(sum);
      }
    }
  }
}

// Empty where the target does not multiply T.
template <class T, class Y, int kVec, bool kMatrix>
__global__ __launch_bounds__(256) void nhwc_conv_tiles_kernel(const T* x, const T* filters, NhwcConvScale scale,
                                                              const Y* bias, const Y* skip, Y* y, float* sums,
                                                              int32_t pixels, int32_t split_depth, NhwcConvShape s) {
  wait_for_predecessor();
  if constexpr (mma::kMultiplies<T>) {
    convolve_tile<T, Y, kVec, kMatrix>(x, filters, scale, bias, skip, y, sums, pixels, split_depth, s);
  }
}

template <class T, int kVec>
__global__ __launch_bounds__(kThreads) void nhwc_conv_sum_kernel(const float* sums, const T* bias, const T* skip, T* y,
                                                                 uint32_t elements, int32_t splits,
                                                                 int32_t filter_count, NhwcConvActivation activation) {
  wait_for_predecessor();
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kVec;
  if (first >= elements) return;
  float totals[kVec] = {}, biases[kVec] = {}, skips[kVec] = {};
  if (bias != nullptr) Vec<T, kVec>::load(bias + first % static_cast<uint32_t>(filter_count)).unpack(biases);
  if (skip != nullptr) Vec<T, kVec>::load(skip + first).unpack(skips);
  sums += first;
#pragma unroll 4  // as many loads at a time
  for (int split = 0; split < splits; ++split) {
    float part[kVec];
    Vec<float, kVec>::load(sums + static_cast<int64_t>(split) * elements).unpack(part);
#pragma unroll
    for (int i = 0; i < kVec; ++i) totals[i] += part[i];
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) totals[i] = activate(totals[i] + biases[i] + skips[i], activation);
  Vec<T, kVec>::pack(totals).store(y + first);
}

namespace {

template <class T>
const char* add_sums(const NhwcConvParams& p, NhwcConvActivation activation, const float* sums, int64_t splits,
                     void* stream) {
  const bool vectors = p.filter_count % 4 == 0 && are_aligned<16>(p.bias, p.skip, p.y, sums);
  return launch(vectors ? nhwc_conv_sum_kernel<T, 4> : nhwc_conv_sum_kernel<T, 1>,
                dim3(ceil_div(p.elements(), kThreads * (vectors ? 4 : 1))), dim3(kThreads), 0, stream, sums,
                static_cast<const T*>(p.bias), static_cast<const T*>(p.skip), static_cast<T*>(p.y), p.elements(),
                splits, p.filter_count, activation);
}

// A launch of the kernel for `p`, whose X and filters are of T; null or an error message.
struct TileLaunch {
  const NhwcConvParams& p;
  NhwcConvShape shape;
  NhwcConvScale scale;
  int64_t splits;
  void* workspace;
  void* stream;

  template <class T, class Y, int kVec, bool kMatrix>
  const char* vectors(float* sums) const {
    const int64_t split_depth = ceil_div(ceil_div(p.inner(), kDepth), splits) * kDepth;
    const dim3 grid(ceil_div(p.pixels(), kPixels), ceil_div(p.filter_count, kFilters), splits);
    return launch(nhwc_conv_tiles_kernel<T, Y, kVec, kMatrix>, grid, dim3(kThreads), 0, stream,
                  static_cast<const T*>(p.x), static_cast<const T*>(p.filters), scale, static_cast<const Y*>(p.bias),
                  static_cast<const Y*>(p.skip), static_cast<Y*>(p.y), sums, p.pixels(), split_depth, shape);
  }

  template <class T, class Y, bool kMatrix>
  const char* elements() const {
    if (p.elements() == 0) return nullptr;
    float* const sums = splits == 1 ? nullptr : static_cast<float*>(workspace);
    const bool whole = p.channels % 8 == 0 && (!kMatrix || p.filter_count % 8 == 0) && are_aligned<16>(p.x, p.filters);
    const char* error = whole ? vectors<T, Y, 8, kMatrix>(sums) : vectors<T, Y, 1, kMatrix>(sums);
    return error != nullptr || sums == nullptr ? error : add_sums<Y>(p, shape.activation, sums, splits, stream);
  }

  template <bool kMatrix>
  const char* run() const {
    return p.dtype == DType::kFloat16 ? elements<half_t, half_t, kMatrix>() : elements<bf16_t, bf16_t, kMatrix>();
  }
};

NhwcConvShape product_shape(const NhwcConvParams& p, bool gelu) {
  NhwcConvShape shape = nhwc_conv_shape(p);
  shape.activation = gelu ? NhwcConvActivation::kGelu : NhwcConvActivation::kNone;
  return shape;
}

}  // namespace

int64_t nhwc_conv_target_blocks() {
  static const int64_t blocks = blocks_that_fill(2, 256);
  return blocks;
}

const char* nhwc_conv_tiles_launch(const NhwcConvParams& p, int64_t splits, void* workspace, void* stream) {
  return TileLaunch{p, nhwc_conv_shape(p), {}, splits, workspace, stream}.run<false>();
}

const char* nhwc_conv_product_launch(const NhwcConvParams& p, bool gelu, int64_t splits, void* workspace,
                                     void* stream) {
  return TileLaunch{p, product_shape(p, gelu), {}, splits, workspace, stream}.run<true>();
}

const char* nhwc_conv_add_sums(const NhwcConvParams& p, NhwcConvActivation activation, const float* sums,
                               int64_t splits, void* stream) {
  return p.dtype == DType::kFloat16 ? add_sums<half_t>(p, activation, sums, splits, stream)
                                    : add_sums<bf16_t>(p, activation, sums, splits, stream);
}

bool nhwc_conv_has_float8() {
#if defined(SD_ORT_EMULATED)
  return mma::kMultiplies<mma::float8x2_t>;
#else
  static const bool has_code = has_static_lds(nhwc_conv_tiles_kernel<mma::float8x2_t, half_t, 8, false>);
  return has_code;
#endif
}

const char* nhwc_conv_float8_launch(const NhwcConvParams& p, NhwcConvScale scale, bool gelu, int64_t splits,
                                    void* workspace, void* stream) {
  const TileLaunch tiles{p, product_shape(p, gelu), scale, splits, workspace, stream};
  return p.dtype == DType::kFloat16 ? tiles.elements<mma::float8x2_t, half_t, false>()
                                    : tiles.elements<mma::float8x2_t, bf16_t, false>();
}

}  // namespace sd_ort
