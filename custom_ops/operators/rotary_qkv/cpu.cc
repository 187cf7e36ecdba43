// RotaryQkv on the CPU: tokens are divided over the threads.
#include "common/cpu.h"

#include "operators/rotary_qkv/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

// Normalizes and turns a query or a key. `scale`, and `cos` with `sin`, may be null.
template <class T>
void prepare(const RotaryQkvParams& p, const T* x, const T* scale, const T* cos, const T* sin, T* y) {
  const int64_t size = 2 * p.pairs, step = p.interleaved ? 2 : 1, other = p.interleaved ? 1 : p.pairs;
  float factor = 1.f;
  if (scale != nullptr) {
    float squares = 0.f;
    for (int64_t i = 0; i < size; ++i) squares += to_float(x[i]) * to_float(x[i]);
    factor = 1.f / __builtin_sqrtf(squares / static_cast<float>(size) + p.epsilon);
  }
  for (int64_t pair = 0; pair < p.pairs; ++pair) {
    const int64_t at = pair * step;
    float a = to_float(x[at]), b = to_float(x[at + other]);
    if (scale != nullptr) {
      a *= factor * to_float(scale[at]);
      b *= factor * to_float(scale[at + other]);
    }
    const float c = cos == nullptr ? 1.f : to_float(cos[pair]), s = cos == nullptr ? 0.f : to_float(sin[pair]);
    y[at] = from_float<T>(cos == nullptr ? a : a * c - b * s);
    y[at + other] = from_float<T>(cos == nullptr ? b : a * s + b * c);
  }
}

template <class T>
void run(const RotaryQkvParams& p, const Parallel& parallel) {
  const int64_t size = 2 * p.pairs, width = p.heads * 3 * size, length = p.length(), tokens = p.batch * length;
  const int64_t tokens_a_task = rows_per_task(width);
  parallel(ceil_div(tokens, tokens_a_task), [&](size_t task) {
    for (int64_t row = task * tokens_a_task; row < tokens && row < int64_t(task + 1) * tokens_a_task; ++row) {
      const int64_t image = row / length, token = row % length;
      const bool is_first = token < p.first.length;
      const RotaryQkvStream& stream = is_first ? p.first : p.second;
      const int64_t source = image * stream.length + token - (is_first ? 0 : p.first.length);
      const T* cos = p.cos == nullptr ? nullptr : static_cast<const T*>(p.cos) + token * p.pairs;
      const T* sin = p.cos == nullptr ? nullptr : static_cast<const T*>(p.sin) + token * p.pairs;
      for (int64_t head = 0; head < p.heads; ++head) {
        const T* x = static_cast<const T*>(stream.qkv) + source * width + head * 3 * size;
        T* y = static_cast<T*>(p.y) + row * width + head * 3 * size;
        prepare(p, x, static_cast<const T*>(stream.q_scale), cos, sin, y);
        prepare(p, x + size, static_cast<const T*>(stream.k_scale), cos, sin, y + size);
        if (y != x) memcpy(y + 2 * size, x + 2 * size, size * sizeof(T));
      }
    }
  });
}

}  // namespace

void rotary_qkv(const RotaryQkvParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
