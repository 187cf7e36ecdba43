// The two ends of NhwcWinograd; between them are products of matrices (candidates.cc). Bandwidth bound: a thread takes
// kVec neighboring channels of one tile, and neighboring threads neighboring channels.
//
// winograd_input_kernel<T, kVec>   v[4 i + j] = (B^T d B)[i, j] of the 4 x 4 pixels d around a tile
// winograd_output_kernel<T, kVec>  y = A^T m A + bias + skip, of the 16 products m of a tile
//   Launch: block (256, 1, 1), grid (ceil(vectors / 256), 1, 1), no LDS; vectors = tiles * channels / kVec.
#include "common/gpu.h"
#include "nhwc_winograd/op.h"

namespace sd_ort {
namespace {

// A tile's first pixel of Y.
struct TilePlace {
  int64_t image;
  int row, column;

  __device__ TilePlace(const WinogradShape& s, uint32_t tile) {
    const uint32_t number = s.first_tile + tile, columns = (s.width + 1) / 2, rows = (s.height + 1) / 2;
    const uint32_t line = number / columns;
    image = line / rows;
    row = static_cast<int>(line % rows) * 2;
    column = static_cast<int>(number % columns) * 2;
  }
};

__device__ inline void transform_input(float& a, float& b, float& c, float& d) {
  const float first = a - c, second = b + c, third = c - b, fourth = b - d;
  a = first;
  b = second;
  c = third;
  d = fourth;
}

}  // namespace

template <class T, int kVec>
__global__ __launch_bounds__(256) void winograd_input_kernel(const T* x, T* v, uint32_t vectors,
                                                             uint32_t vectors_per_tile, WinogradShape s) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const uint32_t tile = vector / vectors_per_tile;
  const int64_t channels = static_cast<int64_t>(vectors_per_tile) * kVec;
  const TilePlace place(s, tile);
  const T* image = x + place.image * s.height * s.width * channels + (vector - tile * vectors_per_tile) * kVec;
  float d[4][4][kVec];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = place.row + i - 1, column = place.column + j - 1;
      const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
      Vec<T, kVec> pixel{};
      if (inside) pixel = Vec<T, kVec>::load(image + (static_cast<int64_t>(row) * s.width + column) * channels);
      pixel.unpack(d[i][j]);
    }
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) transform_input(d[0][j][k], d[1][j][k], d[2][j][k], d[3][j][k]);
#pragma unroll
    for (int i = 0; i < 4; ++i) transform_input(d[i][0][k], d[i][1][k], d[i][2][k], d[i][3][k]);
  }
  const int64_t at = static_cast<int64_t>(vector) * kVec, length = static_cast<int64_t>(vectors) * kVec;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) Vec<T, kVec>::pack(d[i][j]).store(v + (4 * i + j) * length + at);
  }
}

template <class T, int kVec>
__global__ __launch_bounds__(256) void winograd_output_kernel(const T* products, const T* bias, const T* skip, T* y,
                                                              uint32_t vectors, uint32_t vectors_per_tile,
                                                              WinogradShape s) {
  wait_for_predecessor();
  const uint32_t vector = blockIdx.x * 256 + threadIdx.x;
  if (vector >= vectors) return;
  const uint32_t tile = vector / vectors_per_tile, channel = (vector - tile * vectors_per_tile) * kVec;
  const int64_t channels = static_cast<int64_t>(vectors_per_tile) * kVec;
  const int64_t at = static_cast<int64_t>(vector) * kVec, length = static_cast<int64_t>(vectors) * kVec;
  float rows[2][4][kVec];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float m[4][kVec];
#pragma unroll
    for (int i = 0; i < 4; ++i) Vec<T, kVec>::load(products + (4 * i + j) * length + at).unpack(m[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      rows[0][j][k] = m[0][k] + m[1][k] + m[2][k];
      rows[1][j][k] = m[1][k] - m[2][k] - m[3][k];
    }
  }
  float shift[kVec] = {};
  if (bias != nullptr) Vec<T, kVec>::load(bias + channel).unpack(shift);
  const TilePlace place(s, tile);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = place.row + i, column = place.column + j;
      if (row >= s.height || column >= s.width) continue;  // of a last tile that is half outside
      const int64_t to = ((place.image * s.height + row) * s.width + column) * channels + channel;
      float sum[kVec] = {};
      if (skip != nullptr) Vec<T, kVec>::load(skip + to).unpack(sum);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const float made =
            j == 0 ? rows[i][0][k] + rows[i][1][k] + rows[i][2][k] : rows[i][1][k] - rows[i][2][k] - rows[i][3][k];
        sum[k] += made + shift[k];
      }
      Vec<T, kVec>::pack(sum).store(y + to);
    }
  }
}

namespace {

WinogradShape shape(const NhwcWinogradParams& p, const WinogradPiece& piece) {
  return {static_cast<int32_t>(p.height), static_cast<int32_t>(p.width), static_cast<int32_t>(piece.first)};
}

// run(Access<T, kVec>(), vectors, vectors of a tile) of a piece whose tiles have `channels` each.
template <class F>
const char* with_piece(DType dtype, bool aligned, const WinogradPiece& piece, int64_t channels, F&& run) {
  return with_type(dtype, [&](auto type) -> const char* {
    using T = typename decltype(type)::type;
    const int kVec = aligned && channels % 4 == 0 ? 4 : 1;
    const int64_t vectors = piece.tiles * channels / kVec;
    if (vectors == 0) return nullptr;
    if (vectors > INT32_MAX) return "the image is too large";
    if (kVec == 4) return run(Access<T, 4>(), vectors, channels / 4);
    return run(Access<T, 1>(), vectors, channels);
  });
}

}  // namespace

const char* winograd_input_launch(const NhwcWinogradParams& p, const WinogradPiece& piece, void* transformed,
                                  void* stream) {
  const bool aligned = are_aligned<16>(p.x, transformed);
  return with_piece(p.dtype, aligned, piece, p.channels, [&](auto access, int64_t vectors, int64_t per_tile) {
    using T = typename decltype(access)::type;
    return launch(winograd_input_kernel<T, decltype(access)::kVec>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                  static_cast<const T*>(p.x), static_cast<T*>(transformed), vectors, per_tile, shape(p, piece));
  });
}

const char* winograd_output_launch(const NhwcWinogradParams& p, const WinogradPiece& piece, const void* products,
                                   void* stream) {
  const bool aligned = are_aligned<16>(products, p.bias, p.skip, p.y);
  return with_piece(p.dtype, aligned, piece, p.filter_count, [&](auto access, int64_t vectors, int64_t per_tile) {
    using T = typename decltype(access)::type;
    return launch(winograd_output_kernel<T, decltype(access)::kVec>, dim3(ceil_div(vectors, 256)), dim3(256), 0, stream,
                  static_cast<const T*>(products), static_cast<const T*>(p.bias), static_cast<const T*>(p.skip),
                  static_cast<T*>(p.y), vectors, per_tile, shape(p, piece));
  });
}

}  // namespace sd_ort
