// Input and output transforms of NhwcWinograd; candidates.cc runs the GEMMs between. Bandwidth bound: a thread handles
// kVec adjacent channels of one tile, and adjacent threads adjacent channels. kSide is 4, or 3 for upsampled images.
//
// winograd_input_kernel<T, kVec, kSide>   v[kSide i + j] = (B^T d B)[i, j] of the 4 x 4 pixels d around a tile
// winograd_output_kernel<T, kVec, kSide>  y = A^T m A + bias + skip, of the kSide * kSide products m of a tile
//   Launch: block (256, 1, 1), grid (ceil(vectors / 256), 1, 1), no LDS; vectors = tiles * channels / kVec.
#include "operators/nhwc_winograd/kernels/vectors.h"
#include "operators/nhwc_winograd/op.h"

namespace sd_ort {
namespace {

// First pixel of a tile in X.
template <int kSide>
struct TilePlace {
  static constexpr int kPixels = kSide - 2;  // pixels along an axis of a tile
  int64_t image;
  int row, column;

  __device__ TilePlace(const WinogradShape& s, uint32_t tile) {
    const uint32_t number = s.first_tile + tile;
    const uint32_t columns = (s.width + kPixels - 1) / kPixels, rows = (s.height + kPixels - 1) / kPixels;
    const uint32_t line = number / columns;
    image = line / rows;
    row = static_cast<int>(line % rows) * kPixels;
    column = static_cast<int>(number % columns) * kPixels;
  }
};

// B^T applied to the pixels of a line.
__device__ inline void transform_pixels(float& a, float& b, float& c, float& d) {
  const float first = a - c, second = b + c, third = c - b, fourth = b - d;
  a = first;
  b = second;
  c = third;
  d = fourth;
}

// B^T applied to (a, b, b, c), without its third element, which is 0.
__device__ inline void transform_pixels(float& a, float& b, float& c) {
  const float first = a - b, last = b - c;
  a = first;
  b += b;
  c = last;
}

template <int kSide, int kVec>
__device__ inline void transform_tile(float (&d)[kSide][kSide][kVec]) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    if constexpr (kSide == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) transform_pixels(d[0][j][k], d[1][j][k], d[2][j][k], d[3][j][k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) transform_pixels(d[i][0][k], d[i][1][k], d[i][2][k], d[i][3][k]);
    } else {
#pragma unroll
      for (int j = 0; j < 3; ++j) transform_pixels(d[0][j][k], d[1][j][k], d[2][j][k]);
#pragma unroll
      for (int i = 0; i < 3; ++i) transform_pixels(d[i][0][k], d[i][1][k], d[i][2][k]);
    }
  }
}

// A^T applied to the products of a line: its two pixels.
template <int kVec>
__device__ inline void add_products(const float (&m)[4][kVec], float (&first)[kVec], float (&second)[kVec]) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    first[k] = m[0][k] + m[1][k] + m[2][k];
    second[k] = m[1][k] - m[2][k] - m[3][k];
  }
}

template <int kVec>
__device__ inline void add_products(const float (&m)[3][kVec], float (&first)[kVec], float (&second)[kVec]) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    first[k] = m[0][k] + m[1][k];
    second[k] = m[1][k] - m[2][k];
  }
}

}  // namespace

template <class T, int kVec, int kSide>
__global__ __launch_bounds__(256) void winograd_input_kernel(const T* x, T* v, uint32_t vectors,
                                                             uint32_t vectors_per_tile, WinogradShape s) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const uint32_t tile = vector / vectors_per_tile;
  const int64_t channels = static_cast<int64_t>(vectors_per_tile) * kVec;
  const TilePlace<kSide> place(s, tile);
  const T* image = x + place.image * s.height * s.width * channels + (vector - tile * vectors_per_tile) * kVec;
  float d[kSide][kSide][kVec];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int row = place.row + i - 1, column = place.column + j - 1;
      const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
      Vec<T, kVec> pixel{};
      if (inside) pixel = Vec<T, kVec>::load(image + (static_cast<int64_t>(row) * s.width + column) * channels);
      unpack_words(pixel, d[i][j]);
    }
  }
  transform_tile(d);
  const int64_t at = static_cast<int64_t>(vector) * kVec, length = static_cast<int64_t>(vectors) * kVec;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) Vec<T, kVec>::pack(d[i][j]).store(v + (kSide * i + j) * length + at);
  }
}

template <class T, int kVec, int kSide>
__global__ __launch_bounds__(256) void winograd_output_kernel(const T* products, const T* bias, const T* skip, T* y,
                                                              uint32_t vectors, uint32_t vectors_per_tile,
                                                              WinogradShape s) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const uint32_t tile = vector / vectors_per_tile, channel = (vector - tile * vectors_per_tile) * kVec;
  const int64_t channels = static_cast<int64_t>(vectors_per_tile) * kVec;
  const int64_t at = static_cast<int64_t>(vector) * kVec, length = static_cast<int64_t>(vectors) * kVec;
  float rows[2][kSide][kVec];
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    float m[kSide][kVec];
#pragma unroll
    for (int i = 0; i < kSide; ++i) unpack_words(Vec<T, kVec>::load(products + (kSide * i + j) * length + at), m[i]);
    add_products(m, rows[0][j], rows[1][j]);
  }
  float shift[kVec] = {};
  if (bias != nullptr) unpack_words(Vec<T, kVec>::load(bias + channel), shift);
  const TilePlace<kSide> place(s, tile);
  constexpr int kTimes = kSide == 4 ? 1 : 2;
  const int height = s.height * kTimes, width = s.width * kTimes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float pixels[2][kVec];
    add_products(rows[i], pixels[0], pixels[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = place.row * kTimes + i, column = place.column * kTimes + j;
      if (row >= height || column >= width) continue;  // the last tile may extend beyond the image
      const int64_t to = ((place.image * height + row) * width + column) * channels + channel;
      float sum[kVec] = {};
      if (skip != nullptr) unpack_words(Vec<T, kVec>::load(skip + to), sum);
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += pixels[j][k] + shift[k];
      Vec<T, kVec>::pack(sum).store(y + to);
    }
  }
}

namespace {

WinogradShape shape(const NhwcWinogradParams& p, const WinogradTiles& range) {
  return {static_cast<int32_t>(p.height), static_cast<int32_t>(p.width), static_cast<int32_t>(range.first)};
}

template <int kSize>
struct Side {
  static constexpr int value = kSize;
};

// Calls run(Access<T, kVec>(), Side<kSide>(), vectors, vectors per tile) for a range whose tiles have `channels`.
template <class F>
const char* with_piece(const NhwcWinogradParams& p, bool aligned, const WinogradTiles& range, int64_t channels,
                       F&& run) {
  return with_type(p.dtype, [&](auto type) -> const char* {
    using T = typename decltype(type)::type;
    constexpr int kVec = kWinogradVec<T>;
    const bool wide = aligned && channels % kVec == 0;
    const int64_t per_tile = channels / (wide ? kVec : 1), vectors = range.tiles * per_tile;
    if (vectors == 0) return nullptr;
    if (vectors > INT32_MAX) return "the image is too large";
    if (p.upsampled == 0) {
      return wide ? run(Access<T, kVec>(), Side<4>(), vectors, per_tile)
                  : run(Access<T, 1>(), Side<4>(), vectors, per_tile);
    }
    return wide ? run(Access<T, kVec>(), Side<3>(), vectors, per_tile)
                : run(Access<T, 1>(), Side<3>(), vectors, per_tile);
  });
}

}  // namespace

const char* winograd_input_launch(const NhwcWinogradParams& p, const WinogradTiles& range, void* transformed,
                                  void* stream) {
  const bool aligned = are_aligned<16>(p.x, transformed);
  return with_piece(p, aligned, range, p.channels, [&](auto access, auto side, int64_t vectors, int64_t per_tile) {
    using T = typename decltype(access)::type;
    return launch(winograd_input_kernel<T, decltype(access)::kVec, decltype(side)::value>, dim3(ceil_div(vectors, 256)),
                  dim3(256), 0, stream, static_cast<const T*>(p.x), static_cast<T*>(transformed), vectors, per_tile,
                  shape(p, range));
  });
}

const char* winograd_output_launch(const NhwcWinogradParams& p, const WinogradTiles& range, const void* products,
                                   void* stream) {
  const bool aligned = are_aligned<16>(products, p.bias, p.skip, p.y);
  return with_piece(p, aligned, range, p.filter_count, [&](auto access, auto side, int64_t vectors, int64_t per_tile) {
    using T = typename decltype(access)::type;
    return launch(winograd_output_kernel<T, decltype(access)::kVec, decltype(side)::value>,
                  dim3(ceil_div(vectors, 256)), dim3(256), 0, stream, static_cast<const T*>(products),
                  static_cast<const T*>(p.bias), static_cast<const T*>(p.skip), static_cast<T*>(p.y), vectors, per_tile,
                  shape(p, range));
  });
}

}  // namespace sd_ort
