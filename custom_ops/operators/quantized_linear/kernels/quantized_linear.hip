// QuantizedLinear without matrix instructions. Used if no library takes the call, and as the reference of tuning, which
// calls it for products of 10^12 operations and more.
//
// Launch: block (256, 1, 1), grid (row tiles * column tiles, 1, 1), static LDS of 26 KB. A block computes 64 x 64
// elements of Y, a thread 4 x 4; neighboring blocks share their rows of X.
#include "common/float8.h"
#include "common/gpu.h"
#include "common/math.h"
#include "common/quantized_output.h"
#include "operators/quantized_linear/op.h"

namespace sd_ort {

struct QuantizedLinearShape {
  int64_t rows, inner, width;  // of X; K; the columns of Y
  bool one_scale, gelu, gated;
};

namespace quantized_linear {

constexpr int kThreads = 256, kSide = 64, kDepth = 32, kPart = 4;  // of a block; of a tile; of a thread
constexpr int kStride = kSide + kPart;                             // fewer bank conflicts, vectors stay aligned

template <class Sum>
__device__ inline Sum element(uint8_t bits) {
  return float8_to_float(bits);
}
template <>
__device__ inline int element<int>(uint8_t bits) {
  return static_cast<int8_t>(bits);
}

// Loads rows `first` to `first` + kSide of a matrix of `inner` columns, columns `k` to `k` + kDepth, transposed; zeros
// from row `end` and column `inner` on.
template <class Sum>
__device__ inline void load_tile(Sum (*tile)[kStride], const uint8_t* matrix, int64_t first, int64_t end, int64_t k,
                                 int64_t inner) {
#pragma unroll
  for (int i = 0; i < kSide * kDepth / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / kDepth, depth = at % kDepth;
    const bool inside = first + row < end && k + depth < inner;
    tile[depth][row] = inside ? element<Sum>(matrix[(first + row) * inner + k + depth]) : Sum(0);
  }
}

}  // namespace quantized_linear

template <class T, class Sum>
__global__ __launch_bounds__(256) void quantized_linear_kernel(const uint8_t* x, const uint8_t* weight,
                                                               const float* scale, const T* bias, const T* skip,
                                                               QuantizedOutput<T> y, QuantizedLinearShape shape,
                                                               uint32_t column_tiles) {
  wait_for_predecessor();
  using namespace quantized_linear;
  alignas(16) __shared__ Sum x_tile[kDepth][kStride];
  alignas(16) __shared__ Sum weight_tiles[2][kDepth][kStride];
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / column_tiles) * kSide;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % column_tiles) * kSide;
  const int row = static_cast<int>(threadIdx.x) / (kSide / kPart) * kPart;
  const int column = static_cast<int>(threadIdx.x) % (kSide / kPart) * kPart;
  Sum sums[2][kPart][kPart] = {};  // of the column, and of its gate
  for (int64_t k = 0; k < shape.inner; k += kDepth) {
    load_tile(x_tile, x, first_row, shape.rows, k, shape.inner);
    load_tile(weight_tiles[0], weight, first_column, shape.width, k, shape.inner);
    if (shape.gated) {
      load_tile(weight_tiles[1], weight, shape.width + first_column, 2 * shape.width, k, shape.inner);
    }
    block_barrier();
#pragma unroll 4
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (part == 1 && !shape.gated) break;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            sums[part][i][j] += x_tile[depth][row + i] * weight_tiles[part][depth][column + j];
          }
        }
      }
    }
    block_barrier();
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int64_t m = first_row + row + i, n = first_column + column + j, at = m * shape.width + n;
      if (m >= shape.rows || n >= shape.width) continue;
      const auto total = [&](int part, int64_t channel) {
        return static_cast<float>(sums[part][i][j]) * scale[shape.one_scale ? 0 : channel] + to_float(bias[channel]);
      };
      float value = total(0, n);
      if (skip != nullptr) value += to_float(skip[at]);
      if (shape.gelu) value = gelu_tanh(value);
      if (shape.gated) value *= gelu(total(1, n + shape.width));
      y.store(at, value);
    }
  }
}

namespace {

template <class T, class Sum>
const char* launch_sums(const QuantizedLinearParams& p, void* stream) {
  using namespace quantized_linear;
  const QuantizedLinearShape shape = {p.rows, p.inner, p.y_columns(), p.scales == 1, p.gelu != 0, p.gated != 0};
  const int64_t column_tiles = ceil_div(shape.width, kSide), tiles = ceil_div(shape.rows, kSide) * column_tiles;
  if (tiles == 0) return nullptr;
  if (tiles > INT32_MAX) return "Y has more than 2^31 tiles";
  return launch(quantized_linear_kernel<T, Sum>, dim3(static_cast<uint32_t>(tiles)), dim3(kThreads), 0, stream,
                static_cast<const uint8_t*>(p.x), static_cast<const uint8_t*>(p.weight), p.scale,
                static_cast<const T*>(p.bias), static_cast<const T*>(p.skip), QuantizedOutput<T>(p.y, p.quantized),
                shape, static_cast<uint32_t>(column_tiles));
}

template <class T>
const char* launch_type(const QuantizedLinearParams& p, void* stream) {
  return p.eight_bits == DType::kInt8 ? launch_sums<T, int>(p, stream) : launch_sums<T, float>(p, stream);
}

}  // namespace

const char* quantized_linear_launch(const QuantizedLinearParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, stream); });
}

Float8Units quantized_linear_units() {
#if defined(SD_ORT_EMULATED)
  return kHip ? Float8Units::kFnuz : Float8Units::kOcp;
#else
  int device = 0;
  gpuDeviceProp_t properties;
  if (SD_ORT_GPU_NAME(GetDevice)(&device) != gpuSuccess) return Float8Units::kNone;
  if (SD_ORT_GPU_NAME(GetDeviceProperties)(&properties, device) != gpuSuccess) return Float8Units::kNone;
  const std::string arch = arch_name(properties);
  const auto begins = [&](const char* name) { return arch.rfind(name, 0) == 0; };
  if (begins("gfx94")) return Float8Units::kFnuz;
  if (begins("gfx950") || begins("gfx12")) return Float8Units::kOcp;
  return begins("sm_") && std::stoi(arch.substr(3)) >= 89 ? Float8Units::kOcp : Float8Units::kNone;
#endif
}

}  // namespace sd_ort
