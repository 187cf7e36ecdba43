// SkipLayerNormalization on a GPU. Bandwidth bound: input and skip are read once, the row stays in registers.
//
// skip_layer_norm_kernel: kLanes threads a row, kItems vectors of kVec elements each.
//   Launch: block (256, 1, 1), grid (ceil(rows / (256 / kLanes)), 1, 1), static LDS only;
//   needs vectors_per_row <= kLanes * kItems.
// skip_layer_norm_any_kernel: rows of any length, read twice.
//   Launch: block (256, 1, 1), grid (rows, 1, 1), static LDS only.
#include "common/gpu.h"
#include "common/reduce.h"
#include "skip_layer_norm/op.h"

namespace sd_ort {

constexpr int kBlock = 256;

template <class T, int kVec, int kLanes, int kItems>
__global__ __launch_bounds__(kBlock) void skip_layer_norm_kernel(const T* x, const T* skip, const T* gamma,
                                                                 const T* beta, const T* bias, T* y, T* sum,
                                                                 uint32_t rows, uint32_t skip_rows,
                                                                 uint32_t vectors_per_row, float epsilon) {
  static_assert(kLanes <= 32 || kLanes == kBlock, "a row is reduced within a wave or over the whole block");
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(kBlock)];
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t row = blockIdx.x * (kBlock / kLanes) + threadIdx.x / kLanes;
  const bool in_range = row < rows;  // the others keep up with the reductions
  const uint32_t mine = in_range ? vectors_per_row : 0;
  const int64_t begin = static_cast<int64_t>(row) * vectors_per_row * kVec;
  const int64_t skip_begin = static_cast<int64_t>(row % skip_rows) * vectors_per_row * kVec;

  Pack raw[kItems], other[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t vector = lane + i * kLanes;
    if (vector < mine) {
      raw[i] = Pack::load(x + begin + vector * kVec);
      other[i] = Pack::load(skip + skip_begin + vector * kVec);
    }
  }
  float values[kItems][kVec];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t vector = lane + i * kLanes;
    if (vector < mine) {
      float more[kVec];
      raw[i].unpack(values[i]);
      other[i].unpack(more);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[i][k] += more[k];
      if (bias != nullptr) {
        Pack::load(bias + vector * kVec).unpack(more);
#pragma unroll
        for (int k = 0; k < kVec; ++k) values[i][k] += more[k];
      }
      if (sum != nullptr) Pack::pack(values[i]).store(sum + begin + vector * kVec);
#pragma unroll
      for (int k = 0; k < kVec; ++k) total += values[i][k];
    }
  }
  const float channels = static_cast<float>(vectors_per_row * kVec);
  if constexpr (kLanes == kBlock) {
    total = block_reduce<Sum, kBlock>(total, shared);
  } else {
    total = wave_reduce<Sum, kLanes>(total);
  }
  const float mean = total / channels;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (lane + i * kLanes < mine) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) squares += (values[i][k] - mean) * (values[i][k] - mean);
    }
  }
  if constexpr (kLanes == kBlock) {
    squares = block_reduce<Sum, kBlock>(squares, shared + max_waves(kBlock));
  } else {
    squares = wave_reduce<Sum, kLanes>(squares);
  }
  const float factor = rsqrtf(squares / channels + epsilon);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t vector = lane + i * kLanes;
    if (vector < mine) {
      float more[kVec];
      Pack::load(gamma + vector * kVec).unpack(more);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[i][k] = (values[i][k] - mean) * (factor * more[k]);
      if (beta != nullptr) {
        Pack::load(beta + vector * kVec).unpack(more);
#pragma unroll
        for (int k = 0; k < kVec; ++k) values[i][k] += more[k];
      }
      Pack::pack(values[i]).store(y + begin + vector * kVec);
    }
  }
}

template <class T>
__global__ __launch_bounds__(kBlock) void skip_layer_norm_any_kernel(const T* x, const T* skip, const T* gamma,
                                                                     const T* beta, const T* bias, T* y, T* sum,
                                                                     uint32_t skip_rows, uint32_t channels,
                                                                     float epsilon) {
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
    const float normalised = (value(c) - moments.mean) * (factor * to_float(gamma[c]));
    y[begin + c] = from_float<T>(normalised + (beta == nullptr ? 0.f : to_float(beta[c])));
  }
}

namespace {

// One instance of skip_layer_norm_kernel.
struct Shape {
  int lanes;
  int items;
};

template <class T>
constexpr int kWide = 16 / sizeof(T);

bool takes_vectors(const SkipLayerNormParams& p) {
  return p.channels * size_of(p.dtype) % 16 == 0 && are_aligned<16>(p.x, p.skip, p.gamma, p.beta, p.bias, p.y, p.sum);
}

int64_t vectors_per_row(const SkipLayerNormParams& p) { return p.channels * size_of(p.dtype) / 16; }

template <class T, int kLanes, int kItems>
const char* launch_rows(const SkipLayerNormParams& p, void* stream) {
  return launch(skip_layer_norm_kernel<T, kWide<T>, kLanes, kItems>, dim3(ceil_div(p.rows, kBlock / kLanes)),
                dim3(kBlock), 0, stream, static_cast<const T*>(p.x), static_cast<const T*>(p.skip),
                static_cast<const T*>(p.gamma), static_cast<const T*>(p.beta), static_cast<const T*>(p.bias),
                static_cast<T*>(p.y), static_cast<T*>(p.sum), p.rows, p.skip_rows, p.channels / kWide<T>, p.epsilon);
}

template <class T>
const char* launch_any(const SkipLayerNormParams& p, void* stream) {
  return launch(skip_layer_norm_any_kernel<T>, dim3(p.rows), dim3(kBlock), 0, stream, static_cast<const T*>(p.x),
                static_cast<const T*>(p.skip), static_cast<const T*>(p.gamma), static_cast<const T*>(p.beta),
                static_cast<const T*>(p.bias), static_cast<T*>(p.y), static_cast<T*>(p.sum), p.skip_rows, p.channels,
                p.epsilon);
}

// The shortest instance of `lanes` that holds a row; items 0 when none does.
Shape shape_for(const SkipLayerNormParams& p, int lanes) {
  if (!takes_vectors(p)) return {lanes, 0};
  for (int items : {1, 2, 5, 8}) {
    if (vectors_per_row(p) <= lanes * items) return {lanes, items};
  }
  return {lanes, 0};
}

template <class T, int kLanes>
const char* launch_items(const SkipLayerNormParams& p, int items, void* stream) {
  switch (items) {
    case 1:
      return launch_rows<T, kLanes, 1>(p, stream);
    case 2:
      return launch_rows<T, kLanes, 2>(p, stream);
    case 5:
      return launch_rows<T, kLanes, 5>(p, stream);
    case 8:
      return launch_rows<T, kLanes, 8>(p, stream);
    default:
      return launch_any<T>(p, stream);
  }
}

template <class T>
const char* launch_type(const SkipLayerNormParams& p, const SkipLayerNormConfig& config, void* stream) {
  if (p.rows * p.channels == 0) return nullptr;
  if (p.rows > INT32_MAX || p.channels > INT32_MAX) return "more than 2^31 rows or channels";
  const bool rows_fit_a_wave = shape_for(p, 32).items > 0;
  const int lanes = config.lanes > 0 ? config.lanes : rows_fit_a_wave ? 32 : kBlock;
  const int items = config.lanes < 0 ? 0 : shape_for(p, lanes).items;
  return lanes == 32 ? launch_items<T, 32>(p, items, stream) : launch_items<T, kBlock>(p, items, stream);
}

}  // namespace

bool skip_layer_norm_supports(const SkipLayerNormParams& p, const SkipLayerNormConfig& config) {
  return config.lanes <= 0 || shape_for(p, config.lanes).items > 0;
}

const char* skip_layer_norm_launch(const SkipLayerNormParams& p, const SkipLayerNormConfig& config, void* stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_type<float>(p, config, stream);
    case DType::kFloat16:
      return launch_type<half_t>(p, config, stream);
    default:
      return launch_type<bf16_t>(p, config, stream);
  }
}

}  // namespace sd_ort
