// GroupNorm and SkipGroupNorm on the CPU.
//
// Channels first, a group is contiguous: a task normalizes one group in two reads, the second from cache.
// Channels last, tasks handle ranges of pixels: one pass over memory for the statistics, one to normalize.
// Statistics are exact sums over cached chunks (mean first, then squared distances), merged in double.
#include "common/cpu.h"

#include "operators/group_norm/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kChunk = 2048;  // floats: 8 KB of stack, which fits the smallest L1 together with its source

// Count, mean and sum of squared distances from the mean; merged after Chan, Golub and LeVeque (1979).
struct Moments {
  double count = 0, mean = 0, m2 = 0;

  void merge(double other_count, double other_mean, double other_m2) {
    const double total = count + other_count;
    if (total == 0) return;
    const double distance = other_mean - mean;
    mean += distance * other_count / total;
    m2 += other_m2 + distance * distance * count * other_count / total;
    count = total;
  }
  float variance() const { return static_cast<float>(m2 / count); }
};

float inverse_deviation(const Moments& moments, float epsilon) {
  return 1.f / __builtin_sqrtf(moments.variance() + epsilon);
}

float affine(const void* values, DType dtype, int64_t i) {
  float value;
  by_type(dtype, [&](auto sample) { value = to_float(static_cast<const decltype(sample)*>(values)[i]); });
  return value;
}

float total(const float* values, int64_t count) {
  Floats a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    a += load(values + i);
    b += load(values + i + kLanes);
    c += load(values + i + 2 * kLanes);
    d += load(values + i + 3 * kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) a += load(values + i);
  return sum((a + b) + (c + d) + load_some(values + i, count - i));
}

float total_squared_distance(const float* values, int64_t count, float mean) {
  Floats a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const Floats w = load(values + i) - mean, x = load(values + i + kLanes) - mean;
    const Floats y = load(values + i + 2 * kLanes) - mean, z = load(values + i + 3 * kLanes) - mean;
    a += w * w;
    b += x * x;
    c += y * y;
    d += z * z;
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Floats x = load(values + i) - mean;
    a += x * x;
  }
  float squares = sum((a + b) + (c + d));
  for (; i < count; ++i) squares += (values[i] - mean) * (values[i] - mean);
  return squares;
}

template <class T>
class GroupNorm {
 public:
  explicit GroupNorm(const GroupNormParams& params)
      : p(params),
        x(static_cast<const T*>(p.x)),
        skip(static_cast<const T*>(p.skip)),
        bias(static_cast<const T*>(p.bias)),
        y(p.y, p.quantized),
        stored_sum(static_cast<T*>(p.sum)),
        channels_per_group(p.channels / p.groups) {}

  void channels_first(const Parallel& parallel) const {
    parallel(p.batch * p.groups, [this](size_t task) { normalize_group(task / p.groups, task % p.groups); });
  }

  void channels_last(const Parallel& parallel) const {
    const int64_t pixels = pixels_per_task();
    const int64_t tasks = ceil_div(p.spatial, pixels);
    Moments* partial = new Moments[p.batch * tasks * p.groups];
    // (batch, 2, channels): the mean and the factor of each channel
    float* affine_of = new float[p.batch * 2 * p.channels];
    parallel(p.batch * tasks,
             [&](size_t i) { gather_statistics(i / tasks, (i % tasks) * pixels, pixels, partial + i * p.groups); });
    for (int64_t n = 0; n < p.batch; ++n) {
      finish_statistics(partial + n * tasks * p.groups, tasks, affine_of + n * 2 * p.channels);
    }
    parallel(p.batch * tasks, [&](size_t i) {
      normalize_pixels(i / tasks, (i % tasks) * pixels, pixels, affine_of + (i / tasks) * 2 * p.channels);
    });
    delete[] partial;
    delete[] affine_of;
  }

 private:
  // ---- channels first

  void normalize_group(int64_t n, int64_t group) const {
    Moments moments;
    float buffer[kChunk];
    const int64_t first = group * channels_per_group, last = first + channels_per_group;
    for (int64_t c = first; c < last; ++c) {
      for (int64_t at = 0; at < p.spatial; at += kChunk) {
        const int64_t count = p.spatial - at < kChunk ? p.spatial - at : kChunk;
        const float* values = row_values(n, c, at, count, buffer, true);
        const float mean = total(values, count) / count;
        moments.merge(count, mean, total_squared_distance(values, count, mean));
      }
    }
    const float factor = inverse_deviation(moments, p.epsilon);
    for (int64_t c = first; c < last; ++c) {
      const float gamma = factor * affine(p.gamma, p.affine_dtype, c), beta = affine(p.beta, p.affine_dtype, c);
      for (int64_t at = 0; at < p.spatial; at += kChunk) {
        const int64_t count = p.spatial - at < kChunk ? p.spatial - at : kChunk;
        const float* values = row_values(n, c, at, count, buffer, false);
        normalize_row(values, y + (n * p.channels + c) * p.spatial + at, count, moments.mean, gamma, beta);
      }
    }
  }

  // Returns V of a range of pixels of one channel: X itself, or computed into the buffer (and stored as S if
  // `store_sum`).
  const float* row_values(int64_t n, int64_t c, int64_t at, int64_t count, float* buffer, bool store_sum) const {
    const int64_t begin = (n * p.channels + c) * p.spatial + at;
    if (skip == nullptr) return as_floats(x + begin, count, buffer);
    if (stored_sum != nullptr && !store_sum) return as_floats(stored_sum + begin, count, buffer);
    const float offset = channel_offset(n, c);
    const T* other = p.skip_broadcast ? nullptr : skip + begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Floats v = load(x + begin + i) + offset;
      if (other != nullptr) v += load(other + i);
      store(buffer + i, v);
    }
    for (; i < count; ++i) buffer[i] = to_float(x[begin + i]) + offset + (other == nullptr ? 0.f : to_float(other[i]));
    if (stored_sum != nullptr) put(buffer, stored_sum + begin, count);
    return buffer;
  }

  void normalize_row(const float* values, const QuantizedOutput<T>& to, int64_t count, float mean, float gamma,
                     float beta) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, activate((load(values + i) - mean) * gamma + beta));
    if (i < count) store_some(to + i, activate((load_some(values + i, count - i) - mean) * gamma + beta), count - i);
  }

  // ---- channels last

  int64_t pixels_per_task() const {
    const int64_t pixels = (1 << 16) / p.channels;
    return pixels < 1 ? 1 : pixels > p.spatial ? p.spatial : pixels;
  }

  void gather_statistics(int64_t n, int64_t first, int64_t pixels, Moments* moments) const {
    const int64_t last = first + pixels < p.spatial ? first + pixels : p.spatial;
    const int64_t tile = kChunk / p.channels > 0 ? kChunk / p.channels : 1;  // pixels at a time, in cache
    float* values = new float[tile * p.channels + 3 * p.channels];
    float* offsets = values + tile * p.channels;
    float* sums = offsets + p.channels;
    float* means = sums + p.channels;
    fill_offsets(n, offsets);
    for (int64_t at = first; at < last; at += tile) {
      const int64_t count = last - at < tile ? last - at : tile;
      for (int64_t k = 0; k < count; ++k) pixel_values(n, at + k, offsets, values + k * p.channels, true);
      add_up(values, count, nullptr, sums);
      const float numbers = static_cast<float>(count * channels_per_group);
      for (int64_t g = 0; g < p.groups; ++g) {
        const float mean = total(sums + g * channels_per_group, channels_per_group) / numbers;
        for (int64_t c = 0; c < channels_per_group; ++c) means[g * channels_per_group + c] = mean;
      }
      add_up(values, count, means, sums);
      for (int64_t g = 0; g < p.groups; ++g) {
        const int64_t c = g * channels_per_group;
        moments[g].merge(numbers, means[c], total(sums + c, channels_per_group));
      }
    }
    delete[] values;
  }

  // Adds over `count` pixels the values of each channel, or the squared distances from `means`.
  void add_up(const float* values, int64_t count, const float* means, float* sums) const {
    int64_t c = 0;
    for (; c + kLanes <= p.channels; c += kLanes) {
      Floats all = {};
      const Floats mean = means == nullptr ? Floats{} : load(means + c);
      for (int64_t k = 0; k < count; ++k) {
        const Floats v = load(values + k * p.channels + c) - mean;
        all += means == nullptr ? v : v * v;
      }
      store(sums + c, all);
    }
    for (; c < p.channels; ++c) {
      float all = 0;
      for (int64_t k = 0; k < count; ++k) {
        const float v = values[k * p.channels + c] - (means == nullptr ? 0.f : means[c]);
        all += means == nullptr ? v : v * v;
      }
      sums[c] = all;
    }
  }

  void finish_statistics(const Moments* partial, int64_t tasks, float* affine_of) const {
    for (int64_t g = 0; g < p.groups; ++g) {
      Moments moments;
      for (int64_t t = 0; t < tasks; ++t) {
        const Moments& part = partial[t * p.groups + g];
        moments.merge(part.count, part.mean, part.m2);
      }
      const float factor = inverse_deviation(moments, p.epsilon);
      for (int64_t c = g * channels_per_group; c < (g + 1) * channels_per_group; ++c) {
        affine_of[c] = static_cast<float>(moments.mean);
        affine_of[p.channels + c] = factor * affine(p.gamma, p.affine_dtype, c);
      }
    }
  }

  void normalize_pixels(int64_t n, int64_t first, int64_t pixels, const float* means) const {
    const int64_t last = first + pixels < p.spatial ? first + pixels : p.spatial;
    const float* factors = means + p.channels;
    float* buffer = new float[3 * p.channels];
    float* offsets = buffer + p.channels;
    float* betas = offsets + p.channels;
    fill_offsets(n, offsets);
    for (int64_t c = 0; c < p.channels; ++c) betas[c] = affine(p.beta, p.affine_dtype, c);
    for (int64_t at = first; at < last; ++at) {
      pixel_values(n, at, offsets, buffer, false);
      const auto to = y + (n * p.spatial + at) * p.channels;
      int64_t c = 0;
      for (; c + kLanes <= p.channels; c += kLanes) {
        store(to + c, activate((load(buffer + c) - load(means + c)) * load(factors + c) + load(betas + c)));
      }
      const int64_t rest = p.channels - c;
      if (rest > 0) {
        const Floats v = load_some(buffer + c, rest) - load_some(means + c, rest);
        store_some(to + c, activate(v * load_some(factors + c, rest) + load_some(betas + c, rest)), rest);
      }
    }
    delete[] buffer;
  }

  void fill_offsets(int64_t n, float* offsets) const {
    for (int64_t c = 0; c < p.channels; ++c) offsets[c] = skip == nullptr ? 0.f : channel_offset(n, c);
  }

  // Writes V of one pixel to `buffer`, and to S if `store_sum`.
  void pixel_values(int64_t n, int64_t at, const float* offsets, float* buffer, bool store_sum) const {
    const int64_t begin = (n * p.spatial + at) * p.channels;
    const bool stored = stored_sum != nullptr && !store_sum;
    const T* from = stored ? stored_sum + begin : x + begin;
    const T* other = skip == nullptr || p.skip_broadcast || stored ? nullptr : skip + begin;
    int64_t c = 0;
    for (; c + kLanes <= p.channels; c += kLanes) {
      Floats v = load(from + c);
      if (!stored) v += load(offsets + c);
      if (other != nullptr) v += load(other + c);
      store(buffer + c, v);
    }
    for (; c < p.channels; ++c) {
      buffer[c] = to_float(from[c]) + (stored ? 0.f : offsets[c]) + (other == nullptr ? 0.f : to_float(other[c]));
    }
    if (stored_sum != nullptr && store_sum) put(buffer, stored_sum + begin, p.channels);
  }

  // ---- both layouts

  // Sum of the bias and a broadcast skip for each channel.
  float channel_offset(int64_t n, int64_t c) const {
    return (bias == nullptr ? 0.f : to_float(bias[c])) + (p.skip_broadcast ? to_float(skip[n * p.channels + c]) : 0.f);
  }

  Floats activate(Floats v) const { return p.activation == 1 ? silu(v) : v; }

  // Stores V as S and rounds V to it: the second pass reads S, and both must see the same values.
  static void put(float* values, T* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      store(to + i, load(values + i));
      store(values + i, load(to + i));
    }
    for (; i < count; ++i) {
      to[i] = from_float<T>(values[i]);
      values[i] = to_float(to[i]);
    }
  }

  static const float* as_floats(const float* from, int64_t, float*) { return from; }
  template <class Narrow>
  static const float* as_floats(const Narrow* from, int64_t count, float* buffer) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(buffer + i, load(from + i));
    for (; i < count; ++i) buffer[i] = to_float(from[i]);
    return buffer;
  }

  const GroupNormParams& p;
  const T* x;
  const T* skip;
  const T* bias;
  QuantizedOutput<T> y;
  T* stored_sum;
  int64_t channels_per_group;
};

template <class T>
void run(const GroupNormParams& params, const Parallel& parallel) {
  if (params.batch == 0 || params.spatial == 0) return;
  const GroupNorm<T> op(params);
  params.channels_last ? op.channels_last(parallel) : op.channels_first(parallel);
}

}  // namespace

void group_norm(const GroupNormParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
