// AdaptiveNorm on a GPU. Bandwidth bound: a row is read twice, the second time from a cache.
//
// Launch: block (256, 1, 1), grid (ceil(rows / (256 / kLanes)), 1, 1), static LDS only.
#include "common/gpu.h"
#include "common/reduce.h"
#include "operators/adaptive_norm/op.h"

namespace sd_ort {

template <class T, int kVec, int kLanes>
__global__ __launch_bounds__(256) void adaptive_norm_kernel(const T* x, const T* scale, const T* shift, const T* gate,
                                                            const T* skip, T* y, T* sum, uint32_t rows,
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
    Pack::pack(values).store(y + begin + c);
  }
}

namespace {

template <class T, int kVec, int kLanes>
const char* adaptive_norm_rows(const AdaptiveNormParams& p, void* stream) {
  return launch(adaptive_norm_kernel<T, kVec, kLanes>, dim3(ceil_div(p.rows, 256 / kLanes)), dim3(256), 0, stream,
                static_cast<const T*>(p.x), static_cast<const T*>(p.scale), static_cast<const T*>(p.shift),
                static_cast<const T*>(p.gate), static_cast<const T*>(p.skip), static_cast<T*>(p.y),
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
    return config.lanes == 16 ? adaptive_norm_rows<T, kWide, 16>(p, stream)
                              : adaptive_norm_rows<T, kWide, 256>(p, stream);
  });
}

}  // namespace sd_ort
