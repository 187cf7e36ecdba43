// SkipLayerNormalization on a GPU. Bandwidth bound: input and skip are read once; the row stays in registers.
//
// skip_layer_norm_kernel: kLanes threads per row, kItems vectors of kVec elements each.
//   Launch: block (256, 1, 1), grid (ceil(rows / (256 / kLanes)), 1, 1), static LDS only;
//   needs vectors_per_row <= kLanes * kItems.
// skip_layer_norm_any_kernel: rows of any length in two passes.
//   Launch: block (256, 1, 1), grid (rows, 1, 1), static LDS only.
#include "common/gpu.h"
#include "common/quantized_output.h"
#include "common/reduce.h"
#include "operators/skip_layer_norm/op.h"

namespace sd_ort {

constexpr int kBlock = SkipLayerNormConfig::kBlock;

// gamma, beta and bias of a row; absent ones are zero.
template <class T, int kVec, int kItems, class Column>
__device__ inline void load_or_zero(Vec<T, kVec> (&items)[kItems], const T* weights, const Column& column) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items[i] = weights == nullptr ? Vec<T, kVec>{} : Vec<T, kVec>::load(weights + column(i));
  }
}

template <class T, int kVec, int kLanes, int kItems>
__global__ __launch_bounds__(kBlock) void skip_layer_norm_kernel(const T* x, const T* skip, const T* gamma,
                                                                 const T* beta, const T* bias, QuantizedOutput<T> y,
                                                                 T* sum, uint32_t rows, uint32_t skip_rows,
                                                                 uint32_t vectors_per_row, float epsilon) {
  wait_for_predecessor();
  static_assert(kLanes <= 32 || kLanes == kBlock, "a row is reduced within a wave or over the whole block");
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(kBlock)];
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t wanted_row = blockIdx.x * (kBlock / kLanes) + threadIdx.x / kLanes;
  // Threads and items past the end repeat the last row or vector and store nothing: loads without branches need fewer
  // registers, and all threads take part in the reductions.
  const uint32_t row = min(wanted_row, rows - 1);
  const int64_t begin = static_cast<int64_t>(row) * vectors_per_row * kVec;
  const uint32_t skip_row = skip_rows == rows ? row : row % skip_rows;
  const int64_t skip_begin = static_cast<int64_t>(skip_row) * vectors_per_row * kVec;
  const auto is_mine = [&](int i) { return lane + i * kLanes < vectors_per_row; };
  const auto column = [&](int i) { return min(lane + i * kLanes, vectors_per_row - 1) * kVec; };
  const auto reduce = [&](float value, float* scratch) {
    if constexpr (kLanes == kBlock) return block_reduce<Sum, kBlock>(value, scratch);
    return wave_reduce < Sum, kLanes<kBlock ? kLanes : 1>(value);
  };

  // All loads precede the first store, since the compiler must assume that a later load may alias it. The bias comes
  // first, because its presence is a branch.
  Pack raw[kItems], other[kItems], more[kItems];
  load_or_zero<T>(more, bias, column);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    raw[i] = Pack::load(x + begin + column(i));
    other[i] = Pack::load(skip + skip_begin + column(i));
  }
  const float inverse = 1.f / static_cast<float>(vectors_per_row * kVec);
  float values[kItems][kVec];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float a[kVec], b[kVec];
    raw[i].unpack(values[i]);
    other[i].unpack(a);
    more[i].unpack(b);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      values[i][k] += a[k];
      values[i][k] += b[k];
      total += is_mine(i) ? values[i][k] : 0.f;
    }
  }
  Pack scale[kItems], shift[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) scale[i] = Pack::load(gamma + column(i));
  load_or_zero<T>(shift, beta, column);
  if (sum != nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (is_mine(i) && row == wanted_row) Pack::pack(values[i]).store(sum + begin + column(i));
    }
  }
  const float mean = reduce(total, shared) * inverse;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const float distance = is_mine(i) ? values[i][k] - mean : 0.f;
      squares += distance * distance;
    }
  }
  const float factor = rsqrtf(reduce(squares, shared + max_waves(kBlock)) * inverse + epsilon);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float a[kVec], b[kVec];
    scale[i].unpack(a);
    shift[i].unpack(b);
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[i][k] = (values[i][k] - mean) * (factor * a[k]) + b[k];
    if (is_mine(i) && row == wanted_row) y.store(begin + column(i), values[i]);
  }
}

template <class T>
__global__ __launch_bounds__(kBlock) void skip_layer_norm_any_kernel(const T* x, const T* skip, const T* gamma,
                                                                     const T* beta, const T* bias, QuantizedOutput<T> y,
                                                                     T* sum, uint32_t skip_rows, uint32_t channels,
                                                                     float epsilon) {
  wait_for_predecessor();
  __shared__ float shared[2 * max_waves(kBlock)];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * channels;
  const int64_t skip_begin = static_cast<int64_t>(blockIdx.x % skip_rows) * channels;
  const auto value = [&](uint32_t c) {
    return to_float(x[begin + c]) + to_float(skip[skip_begin + c]) + (bias == nullptr ? 0.f : to_float(bias[c]));
  };

  ShiftedSums sums{};
  uint32_t count = 0;
  for (uint32_t c = threadIdx.x; c < channels; c += kBlock, ++count) {
    const float v = value(c);
    if (sum != nullptr) sum[begin + c] = from_float<T>(v);
    if (count == 0) sums.start(v);
    sums.add(v);
  }
  const Moments moments =
      block_moments<kBlock>(sums.moments(static_cast<float>(count)), static_cast<float>(channels), shared);
  const float factor = rsqrtf(moments.m2 / channels + epsilon);
  for (uint32_t c = threadIdx.x; c < channels; c += kBlock) {
    const float normalized = (value(c) - moments.mean) * (factor * to_float(gamma[c]));
    y.store(begin + c, normalized + (beta == nullptr ? 0.f : to_float(beta[c])));
  }
}

namespace {

template <class T>
constexpr int kWide = 16 / sizeof(T);

template <class T, int kLanes, int kItems>
const char* launch_rows(const SkipLayerNormParams& p, void* stream) {
  return launch(skip_layer_norm_kernel<T, kWide<T>, kLanes, kItems>, dim3(ceil_div(p.rows, kBlock / kLanes)),
                dim3(kBlock), 0, stream, static_cast<const T*>(p.x), static_cast<const T*>(p.skip),
                static_cast<const T*>(p.gamma), static_cast<const T*>(p.beta), static_cast<const T*>(p.bias),
                QuantizedOutput<T>(p.y, p.quantized), static_cast<T*>(p.sum), p.rows, p.skip_rows,
                p.channels / kWide<T>, p.epsilon);
}

template <class T>
const char* launch_any(const SkipLayerNormParams& p, void* stream) {
  return launch(skip_layer_norm_any_kernel<T>, dim3(p.rows), dim3(kBlock), 0, stream, static_cast<const T*>(p.x),
                static_cast<const T*>(p.skip), static_cast<const T*>(p.gamma), static_cast<const T*>(p.beta),
                static_cast<const T*>(p.bias), QuantizedOutput<T>(p.y, p.quantized), static_cast<T*>(p.sum),
                p.skip_rows, p.channels, p.epsilon);
}

template <class T, int kLanes>
const char* launch_items(const SkipLayerNormParams& p, int items, void* stream) {
  if (items == 5) return launch_rows<T, kLanes, 5>(p, stream);
  if constexpr (kLanes >= 32) {
    if (items == 2) return launch_rows<T, kLanes, 2>(p, stream);
    if (items == 8) return launch_rows<T, kLanes, 8>(p, stream);
  }
  return "no instance of this size";
}

template <class T>
const char* launch_type(const SkipLayerNormParams& p, const SkipLayerNormConfig& config, void* stream) {
  const int items = config.lanes == 0 ? 0 : skip_layer_norm_items(p, config.lanes);
  switch (config.lanes) {
    case 0:
      return launch_any<T>(p, stream);
    case 8:
      return launch_items<T, 8>(p, items, stream);
    case 16:
      return launch_items<T, 16>(p, items, stream);
    case 32:
      return launch_items<T, 32>(p, items, stream);
    default:
      return launch_items<T, kBlock>(p, items, stream);
  }
}

}  // namespace

const char* skip_layer_norm_launch(const SkipLayerNormParams& p, const SkipLayerNormConfig& config, void* stream) {
  if (p.rows == 0 || p.channels == 0) return nullptr;
  if (p.rows > INT32_MAX || p.channels > INT32_MAX) return "more than 2^31 rows or channels";
  return with_type(p.dtype, [&](auto type) { return launch_type<typename decltype(type)::type>(p, config, stream); });
}

}  // namespace sd_ort
