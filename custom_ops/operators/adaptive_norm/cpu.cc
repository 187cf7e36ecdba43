// AdaptiveNorm on the CPU: rows are divided over the threads. The sum of a row is computed once into a cached buffer.
#include "common/cpu.h"

#include "operators/adaptive_norm/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
const T* vector_of(const void* vectors, int64_t row, int64_t rows, int64_t channels) {
  return vectors == nullptr ? nullptr : static_cast<const T*>(vectors) + row / rows * channels;
}

template <class T>
void gather(const AdaptiveNormParams& p, int64_t row, float* values) {
  const T* x = static_cast<const T*>(p.x) + row * p.channels;
  const T* gate = vector_of<T>(p.gate, row, p.gate_rows, p.channels);
  const T* skip = vector_of<T>(p.skip, row, 1, p.channels);
  T* sum = p.sum == nullptr ? nullptr : static_cast<T*>(p.sum) + row * p.channels;
  int64_t c = 0;
  for (; c + kLanes <= p.channels; c += kLanes) {
    Floats v = load(x + c);
    if (gate != nullptr) v *= load(gate + c);
    if (skip != nullptr) v += load(skip + c);
    store(values + c, v);
    if (sum != nullptr) store(sum + c, v);
  }
  for (; c < p.channels; ++c) {
    values[c] = to_float(x[c]) * (gate == nullptr ? 1.f : to_float(gate[c]));
    if (skip != nullptr) values[c] += to_float(skip[c]);
    if (sum != nullptr) sum[c] = from_float<T>(values[c]);
  }
}

// Returns the sum of the row, or of its squared distances from the mean.
template <bool kSquared>
float total(const float* values, int64_t channels, float mean) {
  Floats all = {};
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    const Floats v = load(values + c) - mean;
    all += kSquared ? v * v : v;
  }
  float result = sum(all);
  for (; c < channels; ++c) {
    const float v = values[c] - mean;
    result += kSquared ? v * v : v;
  }
  return result;
}

template <class T>
void normalize(const AdaptiveNormParams& p, int64_t row, float* values) {
  gather<T>(p, row, values);
  const float mean = p.rms ? 0.f : total<false>(values, p.channels, 0.f) / p.channels;
  const float factor = 1.f / __builtin_sqrtf(total<true>(values, p.channels, mean) / p.channels + p.epsilon);
  const T* scale = vector_of<T>(p.scale, row, p.scale_rows, p.channels);
  const T* shift = vector_of<T>(p.shift, row, p.scale_rows, p.channels);
  const auto y = QuantizedOutput<T>(p.y, p.quantized) + row * p.channels;
  int64_t c = 0;
  for (; c + kLanes <= p.channels; c += kLanes) {
    Floats v = (load(values + c) - mean) * factor * load(scale + c);
    if (shift != nullptr) v += load(shift + c);
    store(y + c, v);
  }
  for (; c < p.channels; ++c) {
    const float v = (values[c] - mean) * factor * to_float(scale[c]);
    store_some(y + c, splat(v + (shift == nullptr ? 0.f : to_float(shift[c]))), 1);
  }
}

template <class T>
void run(const AdaptiveNormParams& p, const Parallel& parallel) {
  const int64_t rows_a_task = rows_per_task(p.channels);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    float* values = new float[p.channels];
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      normalize<T>(p, row, values);
    }
    delete[] values;
  });
}

}  // namespace

void adaptive_norm(const AdaptiveNormParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
