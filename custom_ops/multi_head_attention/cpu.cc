// MultiHeadAttention on the CPU: flash attention. A task takes some queries of one head and walks over the keys in
// blocks that stay in cache; scores are logarithms to base 2, their softmax runs online. All arithmetic is in float32.
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "common/cpu.h"
#include "multi_head_attention/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kRows = 6;      // of a register tile: 6 rows x 16 columns are 12 of AVX2's 16 registers
constexpr int64_t kColumns = 16;  // two vectors
constexpr int64_t kQueries = 96;  // of a task
constexpr int64_t kKeys = 128;    // of a block
constexpr float kLog2E = 1.4426950408889634f;

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 0, to 2 units in the last place: 2^n times the degree-6 Taylor polynomial of 2^r, |r| <= 1/2. Below -126
// it gives 2^-126; NaN stays NaN.
Floats exp2_negative(Floats x) {
  const Floats kept = x < splat(-126.f) ? splat(-126.f) : x;
  const Floats shifter = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = kept + shifter;
  const Floats r = kept - (shifted - shifter);
  Floats p = splat(1.5403530e-4f);  // ln(2)^i / i!
  p = p * r + splat(1.3333558e-3f);
  p = p * r + splat(9.6181291e-3f);
  p = p * r + splat(5.5504109e-2f);
  p = p * r + splat(2.4022651e-1f);
  p = p * r + splat(6.9314718e-1f);
  p = p * r + splat(1.f);
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// to[kRows x kColumns] (+)= sum over depth of rows[row * row_stride + depth] * columns[depth * column_stride + column].
template <bool kAccumulate, int kVectors>
void multiply_tile(const float* rows, int64_t row_stride, const float* columns, int64_t column_stride, int64_t depth,
                   float* to, int64_t to_stride) {
  Floats sums[kRows][kVectors];
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t v = 0; v < kVectors; ++v) sums[i][v] = kAccumulate ? load(to + i * to_stride + v * kLanes) : splat(0.f);
  }
  for (int64_t d = 0; d < depth; ++d) {
    Floats column[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) column[v] = load(columns + d * column_stride + v * kLanes);
    for (int64_t i = 0; i < kRows; ++i) {
      const Floats row = splat(rows[i * row_stride + d]);
      for (int64_t v = 0; v < kVectors; ++v) sums[i][v] += row * column[v];
    }
  }
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t v = 0; v < kVectors; ++v) store(to + i * to_stride + v * kLanes, sums[i][v]);
  }
}

// The same for `row_count` rows (a multiple of kRows) and `column_count` columns (of kLanes).
template <bool kAccumulate>
void multiply(const float* rows, int64_t row_stride, int64_t row_count, const float* columns, int64_t column_stride,
              int64_t column_count, int64_t depth, float* to, int64_t to_stride) {
  int64_t c = 0;
  for (; c + kColumns <= column_count; c += kColumns) {
    for (int64_t r = 0; r < row_count; r += kRows) {
      multiply_tile<kAccumulate, 2>(rows + r * row_stride, row_stride, columns + c, column_stride, depth,
                                    to + r * to_stride + c, to_stride);
    }
  }
  for (; c < column_count; c += kLanes) {
    for (int64_t r = 0; r < row_count; r += kRows) {
      multiply_tile<kAccumulate, 1>(rows + r * row_stride, row_stride, columns + c, column_stride, depth,
                                    to + r * to_stride + c, to_stride);
    }
  }
}

// A row of `count` elements as float, times factor, padded with zeros to `padded` (a multiple of kLanes).
template <class T>
void convert_row(const T* from, int64_t count, int64_t padded, float factor, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i) * splat(factor));
  for (; i < padded; i += kLanes) {
    store(to + i, load_some(from + i, count > i ? count - i : 0) * splat(factor));
  }
}

void transpose_8x8(const Floats (&in)[8], float* to, int64_t stride) {
  Floats a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(in[i], in[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[i + 1] = __builtin_shufflevector(in[i], in[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + j + 2] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    store(to + i * stride, __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(to + (i + 4) * stride, __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// Keys as the columns of the scores: to[i * stride + key], zeros for keys past `count` up to a multiple of kLanes.
template <class T>
void transpose_keys(const T* from, int64_t row_stride, int64_t count, int64_t head_size, float* to, int64_t stride) {
  for (int64_t key = 0; key < count; key += kLanes) {
    int64_t i = 0;
    if (key + kLanes <= count) {
      for (; i + kLanes <= head_size; i += kLanes) {
        Floats rows[8];
        for (int64_t r = 0; r < kLanes; ++r) rows[r] = load(from + (key + r) * row_stride + i);
        transpose_8x8(rows, to + i * stride + key, stride);
      }
    }
    for (; i < head_size; ++i) {
      for (int64_t r = 0; r < kLanes; ++r) {
        to[i * stride + key + r] = key + r < count ? to_float(from[(key + r) * row_stride + i]) : 0.f;
      }
    }
  }
}

// What one row has seen of its keys.
struct RowState {
  float largest;
  float sum;
};

// Scores of one row become weights 2^(score - largest so far). Returns the factor for what was computed before.
float weigh(float* scores, int64_t count, RowState& state) {
  Floats largest = splat(-INFINITY);
  for (int64_t i = 0; i < count; i += kLanes) largest = larger(largest, load(scores + i));
  float updated = state.largest;
  for (int64_t i = 0; i < kLanes; ++i) updated = largest[i] > updated ? largest[i] : updated;
  if (updated == -INFINITY) {  // nothing to see yet
    for (int64_t i = 0; i < count; i += kLanes) store(scores + i, splat(0.f));
    return 1.f;
  }
  const float factor = exp2_negative(splat(state.largest - updated))[0];
  Floats total = splat(0.f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats weight = exp2_negative(load(scores + i) - splat(updated));
    store(scores + i, weight);
    total += weight;
  }
  state.largest = updated;
  state.sum = state.sum * factor + sum(total);
  return factor;
}

// Adds a row of attention_bias, in powers of two. A large negative number stays finite, so that a row where all keys
// have it is their mean; -infinity hides a key.
template <class T>
void add_bias(float* scores, const T* bias, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(bias[i]);
    const float scaled = value * kLog2E;
    scores[i] = value == -INFINITY ? -INFINITY : scores[i] + (scaled < -FLT_MAX ? -FLT_MAX : scaled);
  }
}

// One task's memory, in floats.
struct Buffers {
  float* query;   // kQueries x padded head, scaled
  float* keys;    // head x kKeys
  float* values;  // kKeys x padded head
  float* scores;  // kQueries x kKeys
  float* output;  // kQueries x padded head

  static int64_t size(int64_t head) { return (2 * kQueries + 2 * kKeys) * head + kQueries * kKeys; }
  Buffers(float* memory, int64_t head)
      : query(memory),
        keys(query + kQueries * head),
        values(keys + kKeys * head),
        scores(values + kKeys * head),
        output(scores + kQueries * kKeys) {}
};

template <class T>
const T* head_of(const HeadsView& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
}

// Queries [first, first + count) of one head.
template <class T>
void attend(const MultiHeadAttentionParams& p, int64_t batch, int64_t head, int64_t first, int64_t count,
            const Buffers& buffers) {
  const int64_t padded = round_up(p.head_size, kLanes), rows = round_up(count, kRows);
  RowState states[kQueries];
  for (int64_t r = 0; r < rows; ++r) {
    states[r] = {-INFINITY, 0.f};
    float* to = buffers.query + r * padded;
    if (r < count) {
      convert_row(head_of<T>(p.query, batch, head, first + r), p.head_size, padded, p.scale * kLog2E, to);
    } else {
      memset(to, 0, padded * sizeof(float));
    }
  }
  memset(buffers.output, 0, rows * padded * sizeof(float));
  const T* bias = static_cast<const T*>(p.attention_bias);
  if (bias != nullptr) bias += batch * p.bias_batch_stride + head * p.bias_head_stride;

  const int64_t end = p.causal && first + count < p.kv_sequence ? first + count : p.kv_sequence;
  for (int64_t key = 0; key < end; key += kKeys) {
    const int64_t keys = end - key < kKeys ? end - key : kKeys, padded_keys = round_up(keys, kLanes);
    transpose_keys(head_of<T>(p.key, batch, head, key), p.key.row_stride, keys, p.head_size, buffers.keys, kKeys);
    for (int64_t k = 0; k < keys; ++k) {
      convert_row(head_of<T>(p.value, batch, head, key + k), p.head_size, padded, 1.f, buffers.values + k * padded);
    }
    multiply<false>(buffers.query, padded, rows, buffers.keys, kKeys, padded_keys, p.head_size, buffers.scores, kKeys);
    for (int64_t r = 0; r < count; ++r) {
      float* scores = buffers.scores + r * kKeys;
      if (bias != nullptr) add_bias(scores, bias + (first + r) * p.kv_sequence + key, keys);
      int64_t seen = keys;
      if (p.causal && first + r + 1 - key < keys) seen = first + r + 1 > key ? first + r + 1 - key : 0;
      for (int64_t k = seen; k < padded_keys; ++k) scores[k] = -INFINITY;
      const float factor = weigh(scores, padded_keys, states[r]);
      for (int64_t k = seen; k < padded_keys; ++k) scores[k] = 0.f;
      if (factor != 1.f) {
        float* output = buffers.output + r * padded;
        for (int64_t i = 0; i < padded; i += kLanes) store(output + i, load(output + i) * splat(factor));
      }
    }
    multiply<true>(buffers.scores, kKeys, rows, buffers.values, padded, padded, keys, buffers.output, padded);
  }

  for (int64_t r = 0; r < count; ++r) {
    const Floats inverse = splat(states[r].sum == 0.f ? 0.f : 1.f / states[r].sum);
    const float* from = buffers.output + r * padded;
    T* to = static_cast<T*>(p.output) + ((batch * p.sequence + first + r) * p.heads + head) * p.head_size;
    int64_t i = 0;
    for (; i + kLanes <= p.head_size; i += kLanes) store(to + i, load(from + i) * inverse);
    if (i < p.head_size) store_some(to + i, load(from + i) * inverse, p.head_size - i);
  }
}

template <class T>
void run(const MultiHeadAttentionParams& p, const Parallel& parallel) {
  const int64_t blocks = (p.sequence + kQueries - 1) / kQueries, heads = p.batch * p.heads;
  if (blocks * heads * p.head_size == 0) return;
  // Blocks of even size: 100 queries are 54 and 46, not 96 and 4.
  const int64_t queries = round_up((p.sequence + blocks - 1) / blocks, kRows);
  const int64_t padded = round_up(p.head_size, kLanes);
  parallel(blocks * heads, [&](size_t task) {
    const int64_t head = task / blocks, first = task % blocks * queries;
    if (first >= p.sequence) return;
    const int64_t count = p.sequence - first < queries ? p.sequence - first : queries;
    void* memory = aligned_alloc(64, round_up(Buffers::size(padded) * sizeof(float), 64));
    attend<T>(p, head / p.heads, head % p.heads, first, count, Buffers(static_cast<float*>(memory), padded));
    free(memory);
  });
}

}  // namespace

void multi_head_attention(const MultiHeadAttentionParams& params, const Parallel& parallel) {
  params.dtype == DType::kFloat32 ? run<float>(params, parallel) : run<Half>(params, parallel);
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
