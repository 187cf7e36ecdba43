// AdaptiveNorm on a GPU. Bandwidth bound: a row is read twice, the second time from a cache, or once into registers.
//
// Launch: block (256, 1, 1), grid (ceil(rows / (256 / kLanes)), 1, 1); registers: block (128, 1, 1), grid (rows, 1, 1).
// Static LDS only.
#include "common/gpu.h"
#include "common/quantized_output.h"
#include "common/reduce.h"
#include "operators/adaptive_norm/op.h"

namespace sd_ort {

template <class T, int kVec, int kLanes>
__global__ __launch_bounds__(256) void adaptive_norm_kernel(const T* x, const T* scale, const T* shift, const T* gate,
                                                            const T* skip, QuantizedOutput<T> y, T* sum, uint32_t rows,
                                                            uint32_t channels, uint32_t scale_rows, uint32_t gate_rows,
                                                            float epsilon, bool rms) {
  wait_for_predecessor();
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(256)];
  const uint32_t first = threadIdx.x % kLanes * kVec;
  const uint32_t wanted_row = blockIdx.x * (256 / kLanes) + threadIdx.x / kLanes;
  // Threads past the end repeat the last row and store nothing: all threads take part in the reductions.
  const uint32_t row = min(wanted_row, rows - 1);
  const int64_t begin = static_cast<int64_t>(row) * channels;
  const int64_t vector_begin = static_cast<int64_t>(row / scale_rows) * channels;
  const int64_t gate_begin = static_cast<int64_t>(row / gate_rows) * channels;
  const auto reduce = [&](float value, float* scratch) {
    if constexpr (kLanes == 256) return block_reduce<Sum, 256>(value, scratch);
    return wave_reduce < Sum, kLanes<256 ? kLanes : 1>(value);
  };
  const auto load = [&](uint32_t c, float(&values)[kVec]) {
    float other[kVec];
    Pack::load(x + begin + c).unpack(values);
    if (gate != nullptr) {
      Pack::load(gate + gate_begin + c).unpack(other);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[k] *= other[k];
    }
    if (skip != nullptr) {
      Pack::load(skip + begin + c).unpack(other);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[k] += other[k];
    }
  };

  ShiftedSums sums{};
  uint32_t count = 0;
  for (uint32_t c = first; c < channels; c += kLanes * kVec) {
    float values[kVec];
    load(c, values);
    if (count == 0) sums.start(values[0]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sums.add(values[k]);
    if (sum != nullptr && row == wanted_row) Pack::pack(values).store(sum + begin + c);
    count += kVec;
  }
  const Moments mine = sums.moments(static_cast<float>(count));
  const float inverse = 1.f / static_cast<float>(channels);
  const float mean = rms ? 0.f : reduce(mine.count * mine.mean, shared) * inverse;
  const float distance = mine.mean - mean;
  const float squares = reduce(mine.m2 + mine.count * distance * distance, shared + max_waves(256));
  const float factor = rsqrtf(squares * inverse + epsilon);
  if (row != wanted_row) return;
  for (uint32_t c = first; c < channels; c += kLanes * kVec) {
    float values[kVec], a[kVec], b[kVec] = {};
    load(c, values);
    Pack::load(scale + vector_begin + c).unpack(a);
    if (shift != nullptr) Pack::load(shift + vector_begin + c).unpack(b);
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[k] = (values[k] - mean) * (factor * a[k]) + b[k];
    y.store(begin + c, values);
  }
}

// A block per row of at most 128 * kPacks accesses.
template <class T, int kPacks>
__global__ __launch_bounds__(128) void adaptive_norm_registers(const T* x, const T* scale, const T* shift,
                                                               const T* gate, const T* skip, QuantizedOutput<T> y,
                                                               T* sum, uint32_t channels, uint32_t scale_rows,
                                                               uint32_t gate_rows, float epsilon, bool rms) {
  wait_for_predecessor();
  constexpr int kVec = 16 / sizeof(T);
  using Pack = Vec<T, kVec>;
  __shared__ float shared[2 * max_waves(128)];
  const uint32_t row = blockIdx.x;
  const int64_t begin = static_cast<int64_t>(row) * channels;
  const int64_t vector_begin = static_cast<int64_t>(row / scale_rows) * channels;
  const int64_t gate_begin = static_cast<int64_t>(row / gate_rows) * channels;
  const float inverse = 1.f / static_cast<float>(channels);
  float values[kPacks][kVec];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t c = (threadIdx.x + i * 128) * kVec;
    if (c >= channels) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[i][k] = 0.f;
      continue;
    }
    Pack::load(x + begin + c).unpack(values[i]);
    float other[kVec];
    if (gate != nullptr) {
      Pack::load(gate + gate_begin + c).unpack(other);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[i][k] *= other[k];
    }
    if (skip != nullptr) {
      Pack::load(skip + begin + c).unpack(other);
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[i][k] += other[k];
    }
    if (sum != nullptr) Pack::pack(values[i]).store(sum + begin + c);
#pragma unroll
    for (int k = 0; k < kVec; ++k) total += values[i][k];
  }
  const float mean = rms ? 0.f : block_reduce<Sum, 128>(total, shared) * inverse;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if ((threadIdx.x + i * 128) * kVec >= channels) continue;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      values[i][k] -= mean;
      squares += values[i][k] * values[i][k];
    }
  }
  const float factor = rsqrtf(block_reduce<Sum, 128>(squares, shared + max_waves(128)) * inverse + epsilon);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t c = (threadIdx.x + i * 128) * kVec;
    if (c >= channels) continue;
    float a[kVec], b[kVec] = {};
    Pack::load(scale + vector_begin + c).unpack(a);
    if (shift != nullptr) Pack::load(shift + vector_begin + c).unpack(b);
#pragma unroll
    for (int k = 0; k < kVec; ++k) a[k] = values[i][k] * (factor * a[k]) + b[k];
    y.store(begin + c, a);
  }
}

namespace {

template <class T, int kPacks>
const char* adaptive_norm_in_registers(const AdaptiveNormParams& p, void* stream) {
  return launch(adaptive_norm_registers<T, kPacks>, dim3(p.rows), dim3(128), 0, stream, static_cast<const T*>(p.x),
                static_cast<const T*>(p.scale), static_cast<const T*>(p.shift), static_cast<const T*>(p.gate),
                static_cast<const T*>(p.skip), QuantizedOutput<T>(p.y, p.quantized), static_cast<T*>(p.sum), p.channels,
                p.scale_rows, p.gate_rows, p.epsilon, p.rms != 0);
}

template <class T, int kVec, int kLanes>
const char* adaptive_norm_rows(const AdaptiveNormParams& p, void* stream) {
  return launch(adaptive_norm_kernel<T, kVec, kLanes>, dim3(ceil_div(p.rows, 256 / kLanes)), dim3(256), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.scale), static_cast<const T*>(p.shift),
                static_cast<const T*>(p.gate), static_cast<const T*>(p.skip), QuantizedOutput<T>(p.y, p.quantized),
                static_cast<T*>(p.sum), p.rows, p.channels, p.scale_rows, p.gate_rows, p.epsilon, p.rms != 0);
}

}  // namespace

const char* adaptive_norm_launch(const AdaptiveNormParams& p, const AdaptiveNormConfig& config, void* stream) {
  if (p.rows == 0) return nullptr;
  if (p.rows > INT32_MAX || p.channels > INT32_MAX) return "more than 2^31 rows or channels";
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWide = 16 / sizeof(T);
    if (!config.vectors) return adaptive_norm_rows<T, 1, 256>(p, stream);
    if (config.lanes == 128) {
      const int64_t packs = ceil_div(p.channels, 128 * kWide);
      if (packs > 2)
        return packs == 3 ? adaptive_norm_in_registers<T, 3>(p, stream) : adaptive_norm_in_registers<T, 4>(p, stream);
      return packs == 2 ? adaptive_norm_in_registers<T, 2>(p, stream) : adaptive_norm_in_registers<T, 1>(p, stream);
    }
    return config.lanes == 16 ? adaptive_norm_rows<T, kWide, 16>(p, stream)
                              : adaptive_norm_rows<T, kWide, 256>(p, stream);
  });
}

}  // namespace sd_ort
