// RotaryEmbedding on the CPU: tokens are divided over the threads.
#include "common/cpu.h"

#include "operators/rotary_embedding/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

template <class T>
void turn_head(const T* x, const T* cos, const T* sin, T* y, int64_t pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs;
  int64_t i = 0;
  if (!interleaved) {
    for (; i + kLanes <= pairs; i += kLanes) {
      const Floats a = load(x + i), b = load(x + i + pairs), c = load(cos + i), s = load(sin + i);
      store(y + i, a * c - b * s);
      store(y + i + pairs, a * s + b * c);
    }
  }
  for (; i < pairs; ++i) {
    const float a = to_float(x[i * step]), b = to_float(x[i * step + other]);
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    y[i * step] = from_float<T>(a * c - b * s);
    y[i * step + other] = from_float<T>(a * s + b * c);
  }
}

template <class T>
void run(const RotaryEmbeddingParams& p, const Parallel& parallel) {
  const int64_t width = p.heads * 2 * p.pairs, tokens = p.batch * p.length;
  const int64_t tokens_a_task = rows_per_task(width);
  parallel(ceil_div(tokens, tokens_a_task), [&](size_t task) {
    for (int64_t token = task * tokens_a_task; token < tokens && token < int64_t(task + 1) * tokens_a_task; ++token) {
      const int64_t position = p.positions[0] + token % p.length;
      const int64_t row = position < 0 ? 0 : position < p.table_rows ? position : p.table_rows - 1;
      const T* cos = static_cast<const T*>(p.cos) + row * p.pairs;
      const T* sin = static_cast<const T*>(p.sin) + row * p.pairs;
      for (int64_t at = token * width; at < (token + 1) * width; at += 2 * p.pairs) {
        turn_head(static_cast<const T*>(p.x) + at, cos, sin, static_cast<T*>(p.y) + at, p.pairs, p.interleaved != 0);
      }
    }
  });
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
