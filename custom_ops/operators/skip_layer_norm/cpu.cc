// SkipLayerNormalization on the CPU: rows are divided over the threads. The sum of a row is computed once into a cached
// buffer, from which mean, variance and output are computed.
#include "common/cpu.h"

#include "operators/skip_layer_norm/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
class SkipLayerNorm {
 public:
  explicit SkipLayerNorm(const SkipLayerNormParams& params)
      : p(params),
        gamma(static_cast<const T*>(p.gamma)),
        beta(static_cast<const T*>(p.beta)),
        bias(static_cast<const T*>(p.bias)) {}

  void normalize(int64_t row, float* values) const {
    gather(row, values);
    const float mean = total<false>(values, 0.f) / p.channels;
    const float factor = 1.f / __builtin_sqrtf(total<true>(values, mean) / p.channels + p.epsilon);
    const auto to = QuantizedOutput<T>(p.y, p.quantized) + row * p.channels;
    int64_t c = 0;
    for (; c + kLanes <= p.channels; c += kLanes) {
      Floats v = (load(values + c) - mean) * factor * load(gamma + c);
      if (beta != nullptr) v += load(beta + c);
      store(to + c, v);
    }
    for (; c < p.channels; ++c) {
      const float v = (values[c] - mean) * factor * to_float(gamma[c]);
      const Floats result = splat(v + (beta == nullptr ? 0.f : to_float(beta[c])));
      store_some(to + c, result, 1);
    }
  }

 private:
  // Computes V of a row, also into `sum`.
  void gather(int64_t row, float* values) const {
    const T* x = static_cast<const T*>(p.x) + row * p.channels;
    const T* skip = static_cast<const T*>(p.skip) + row % p.skip_rows * p.channels;
    T* sum = p.sum == nullptr ? nullptr : static_cast<T*>(p.sum) + row * p.channels;
    int64_t c = 0;
    for (; c + kLanes <= p.channels; c += kLanes) {
      Floats v = load(x + c) + load(skip + c);
      if (bias != nullptr) v += load(bias + c);
      store(values + c, v);
      if (sum != nullptr) store(sum + c, v);
    }
    for (; c < p.channels; ++c) {
      values[c] = to_float(x[c]) + to_float(skip[c]) + (bias == nullptr ? 0.f : to_float(bias[c]));
      if (sum != nullptr) sum[c] = from_float<T>(values[c]);
    }
  }

  // Returns the sum of the row, or of its squared distances from the mean.
  template <bool kSquared>
  float total(const float* values, float mean) const {
    Floats all = {};
    int64_t c = 0;
    for (; c + kLanes <= p.channels; c += kLanes) {
      const Floats v = load(values + c) - mean;
      all += kSquared ? v * v : v;
    }
    float result = sum(all);
    for (; c < p.channels; ++c) {
      const float v = values[c] - mean;
      result += kSquared ? v * v : v;
    }
    return result;
  }

  const SkipLayerNormParams& p;
  const T* gamma;
  const T* beta;
  const T* bias;
};

template <class T>
void run(const SkipLayerNormParams& p, const Parallel& parallel) {
  const SkipLayerNorm<T> op(p);
  const int64_t rows_a_task = rows_per_task(p.channels);
  parallel(ceil_div(p.rows, rows_a_task), [&](size_t task) {
    float* values = new float[p.channels];
    for (int64_t row = task * rows_a_task; row < p.rows && row < int64_t(task + 1) * rows_a_task; ++row) {
      op.normalize(row, values);
    }
    delete[] values;
  });
}

}  // namespace

void skip_layer_norm(const SkipLayerNormParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
