// MultiHeadAttention on the CPU: flash attention. A task handles some queries of one head and iterates over the keys in
// cached blocks with an online softmax; scores are logarithms to base 2. All arithmetic is float32.
#include "common/cpu.h"

#include <cfloat>
#include <cmath>
#include <new>

#include "operators/multi_head_attention/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kRows = 12;  // rows of a register tile: 12 rows of two vectors use 24 of 32 registers
#else
constexpr int64_t kRows = 6;  // uses 12 of 16 AVX2 registers
#endif
constexpr int64_t kColumns = 2 * kLanes;
constexpr int64_t kQueries = 192;  // at most, per task
constexpr int64_t kKeys = 128;     // per block
constexpr float kLog2E = 1.4426950408889634f;

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 0 with an error of 2 units in the last place: 2^n times the degree-6 Taylor polynomial of 2^r, |r| <=
// 1/2. Below -126 the result is 2^-126; NaN stays NaN.
Floats exp2_negative(Floats x) {
  const Floats clamped = x < splat(-126.f) ? splat(-126.f) : x;
  const Floats shifter = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = clamped + shifter;
  const Floats r = clamped - (shifted - shifter);
  Floats p = splat(1.5403530e-4f);  // ln(2)^i / i!
  p = p * r + splat(1.3333558e-3f);
  p = p * r + splat(9.6181291e-3f);
  p = p * r + splat(5.5504109e-2f);
  p = p * r + splat(2.4022651e-1f);
  p = p * r + splat(6.9314718e-1f);
  p = p * r + splat(1.f);
  const Floats power = (Floats)((Ints)p + ((Ints)shifted << 23));
  return x == x ? power : x;  // the exponent bits could turn NaN into a number
}

// Matrices are stored in panels of kColumns columns, each contiguous: element (depth, column) is at
// columns[(column / kColumns * depths + depth) * kColumns + column % kColumns].

// to[kTileRows x kVectors * kLanes] (+)= sum over depth of rows[row * row_stride + depth] * panel[depth * kColumns +
// column].
template <bool kAccumulate, int kTileRows, int kVectors>
void multiply_tile(const float* rows, int64_t row_stride, const float* panel, int64_t depth, float* to,
                   int64_t to_stride) {
  Floats sums[kTileRows][kVectors];
#pragma GCC unroll 24
  for (int64_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 24
    for (int64_t v = 0; v < kVectors; ++v)
      sums[i][v] = kAccumulate ? load(to + i * to_stride + v * kLanes) : splat(0.f);
  }
  for (int64_t d = 0; d < depth; ++d) {
    Floats column[kVectors];
#pragma GCC unroll 24
    for (int64_t v = 0; v < kVectors; ++v) column[v] = load(panel + d * kColumns + v * kLanes);
#pragma GCC unroll 24
    for (int64_t i = 0; i < kTileRows; ++i) {
      const Floats row = splat(rows[i * row_stride + d]);
#pragma GCC unroll 24
      for (int64_t v = 0; v < kVectors; ++v) sums[i][v] += row * column[v];
    }
  }
#pragma GCC unroll 24
  for (int64_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 24
    for (int64_t v = 0; v < kVectors; ++v) store(to + i * to_stride + v * kLanes, sums[i][v]);
  }
}

// Computes `row_count` rows (a multiple of kRows) and `column_count` columns (of kLanes), in panels of `depths`.
template <bool kAccumulate>
void multiply(const float* rows, int64_t row_stride, int64_t row_count, const float* columns, int64_t depths,
              int64_t column_count, int64_t depth, float* to, int64_t to_stride) {
  for (int64_t c = 0; c < column_count; c += kColumns, columns += depths * kColumns) {
    const bool full = column_count - c >= kColumns;
    for (int64_t r = 0; r < row_count;) {
      const float* from = rows + r * row_stride;
      float* tile = to + r * to_stride + c;
      if (full) {
        multiply_tile<kAccumulate, kRows, 2>(from, row_stride, columns, depth, tile, to_stride);
        r += kRows;
      } else if (row_count - r >= 2 * kRows) {
        multiply_tile<kAccumulate, 2 * kRows, 1>(from, row_stride, columns, depth, tile, to_stride);
        r += 2 * kRows;
      } else {
        multiply_tile<kAccumulate, kRows, 1>(from, row_stride, columns, depth, tile, to_stride);
        r += kRows;
      }
    }
  }
}

// Converts a row of `count` elements to float, times factor, padded with zeros to a multiple of kLanes.
template <class T>
void scale_row(const T* from, int64_t count, float factor, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats values = i + kLanes <= count ? load(from + i) : load_some(from + i, count - i);
    store(to + i, values * splat(factor));
  }
}

// Packs keys as columns of the scores, in panels of head_size; zeros for keys beyond `count` up to a multiple of
// kLanes.
template <class T>
void pack_keys(const T* from, int64_t row_stride, int64_t count, int64_t head_size, float* to) {
  for (int64_t key = 0; key < round_up(count, kLanes); key += 8) {
    float* panel = to + key / kColumns * head_size * kColumns + key % kColumns;
    int64_t i = 0;
    if (key + 8 <= count) {
      for (; i + 8 <= head_size; i += 8) {
        Eight rows[8];
        for (int64_t r = 0; r < 8; ++r) rows[r] = load_eight(from + (key + r) * row_stride + i);
        transpose_8x8(rows);
        for (int64_t r = 0; r < 8; ++r) store_eight(panel + (i + r) * kColumns, rows[r]);
      }
    }
    for (; i < head_size; ++i) {
      for (int64_t r = 0; r < 8; ++r) {
        panel[i * kColumns + r] = key + r < count ? to_float(from[(key + r) * row_stride + i]) : 0.f;
      }
    }
  }
}

// Packs values as columns of the output, in panels of kKeys; zeros beyond head_size up to a multiple of kLanes.
template <class T>
void pack_values(const T* from, int64_t row_stride, int64_t count, int64_t head_size, float* to) {
  for (int64_t key = 0; key < count; ++key) {
    const T* row = from + key * row_stride;
    for (int64_t i = 0; i < head_size; i += kLanes) {
      float* at = to + (i / kColumns * kKeys + key) * kColumns + i % kColumns;
      store(at, i + kLanes <= head_size ? load(row + i) : load_some(row + i, head_size - i));
    }
  }
}

// Softmax state of one row.
struct RowState {
  float largest;
  float sum;
};

// Converts the scores of one row to weights 2^(score - running maximum). Returns the factor for earlier results.
float weigh(float* scores, int64_t count, RowState& state) {
  Floats maxima = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) maxima = larger(maxima, load(scores + i));
  const float largest = sd_ort::SD_ORT_ISA::largest(maxima);
  const float updated = largest > state.largest ? largest : state.largest;
  if (updated == -INFINITY) {  // no visible key yet, or NaN, which comparisons ignore
    Floats zero_or_nan = splat(0.f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats score = load(scores + i);
      zero_or_nan = score == score ? zero_or_nan : score;
      store(scores + i, splat(0.f));
    }
    state.sum += sum(zero_or_nan);
    return 1.f;
  }
  Floats total = splat(0.f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats weight = exp2_negative(load(scores + i) - splat(updated));
    store(scores + i, weight);
    total += weight;
  }
  const float factor = updated == state.largest ? 1.f : exp2_negative(splat(state.largest - updated))[0];
  state.largest = updated;
  state.sum = state.sum * factor + sum(total);
  return factor;
}

// Adds a row of attention_bias, scaled to base 2. Large negative values stay finite, so that a row where all keys have
// one is their mean; -infinity hides a key.
template <class T>
void add_bias(float* scores, const T* bias, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(bias[i]);
    const float scaled = value * kLog2E;
    scores[i] += scaled < -FLT_MAX && value != -INFINITY ? -FLT_MAX : scaled;
  }
}

// Memory of a task, in floats.
struct Buffers {
  float* keys;    // kKeys columns, head_size deep, in panels
  float* values;  // head_size columns, kKeys deep, in panels
  float* scores;  // kQueries x kKeys
  float* query;   // kQueries x padded head_size, scaled
  float* output;  // kQueries x padded head_size

  static int64_t size(int64_t head_size) {
    const int64_t columns = round_up(head_size, kColumns);
    return 2 * kKeys * columns + kQueries * kKeys + 2 * kQueries * columns;
  }
  Buffers(float* memory, int64_t head_size)
      : keys(memory),
        values(keys + kKeys * round_up(head_size, kColumns)),
        scores(values + kKeys * round_up(head_size, kColumns)),
        query(scores + kQueries * kKeys),
        output(query + kQueries * round_up(head_size, kColumns)) {}
};

template <class T>
const T* head_of(const HeadsView& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
}

// Computes queries [first, first + count) of one head.
template <class T>
void attend(const MultiHeadAttentionParams& p, int64_t batch, int64_t head, int64_t first, int64_t count,
            const Buffers& buffers) {
  const int64_t padded = round_up(p.head_size, kLanes), rows = round_up(count, kRows);
  RowState states[kQueries];
  for (int64_t r = 0; r < rows; ++r) {
    states[r] = {-INFINITY, 0.f};
    float* to = buffers.query + r * padded;
    if (r < count) {
      scale_row(head_of<T>(p.query, batch, head, first + r), p.head_size, p.scale * kLog2E, to);
    } else {
      memset(to, 0, padded * sizeof(float));
    }
  }
  const T* bias = static_cast<const T*>(p.attention_bias);
  if (bias != nullptr) bias += batch * p.bias_batch_stride + head * p.bias_head_stride;

  if (p.kv_sequence == 0) memset(buffers.output, 0, rows * padded * sizeof(float));
  const int64_t end = p.causal && first + count < p.kv_sequence ? first + count : p.kv_sequence;
  for (int64_t key = 0; key < end; key += kKeys) {
    const int64_t keys = end - key < kKeys ? end - key : kKeys, padded_keys = round_up(keys, kLanes);
    pack_keys(head_of<T>(p.key, batch, p.kv_head(head), key), p.key.row_stride, keys, p.head_size, buffers.keys);
    pack_values(head_of<T>(p.value, batch, p.kv_head(head), key), p.value.row_stride, keys, p.head_size,
                buffers.values);
    multiply<false>(buffers.query, padded, rows, buffers.keys, p.head_size, padded_keys, p.head_size, buffers.scores,
                    kKeys);
    for (int64_t r = 0; r < count; ++r) {
      float* scores = buffers.scores + r * kKeys;
      if (bias != nullptr) add_bias(scores, bias + (first + r) * p.kv_sequence + key, keys);
      int64_t seen = keys;
      if (p.causal && first + r + 1 - key < keys) seen = first + r + 1 > key ? first + r + 1 - key : 0;
      for (int64_t k = seen; k < padded_keys; ++k) scores[k] = -INFINITY;
      const float factor = weigh(scores, padded_keys, states[r]);
      for (int64_t k = seen; k < padded_keys; ++k) scores[k] = 0.f;
      if (key > 0 && factor != 1.f) {
        float* output = buffers.output + r * padded;
        for (int64_t i = 0; i < padded; i += kLanes) store(output + i, load(output + i) * splat(factor));
      }
    }
    const auto add = key > 0 ? multiply<true> : multiply<false>;
    add(buffers.scores, kKeys, rows, buffers.values, kKeys, padded, keys, buffers.output, padded);
  }

  for (int64_t r = 0; r < count; ++r) {
    const Floats inverse = splat(states[r].sum == 0.f ? 0.f : 1.f / states[r].sum);
    const float* from = buffers.output + r * padded;
    const auto to =
        QuantizedOutput<T>(p.output, p.quantized) + ((batch * p.sequence + first + r) * p.heads + head) * p.head_size;
    int64_t i = 0;
    for (; i + kLanes <= p.head_size; i += kLanes) store(to + i, load(from + i) * inverse);
    if (i < p.head_size) store_some(to + i, load(from + i) * inverse, p.head_size - i);
  }
}

template <class T>
void run(const MultiHeadAttentionParams& p, const Parallel& parallel) {
  if (p.batch == 0 || p.heads == 0 || p.sequence == 0 || p.head_size == 0) return;
  const int64_t max_queries = p.head_size > 128 ? kQueries / 2 : kQueries;  // keeps the buffers in the L2 cache
  const int64_t blocks = (p.sequence + max_queries - 1) / max_queries, heads = p.batch * p.heads;
  // Blocks of even size: 200 queries are 102 and 98, not 192 and 8.
  constexpr std::align_val_t kAlignment{64};
  const int64_t queries = round_up((p.sequence + blocks - 1) / blocks, kRows);
  parallel(blocks * heads, [&](size_t task) {
    const int64_t head = task / blocks, first = task % blocks * queries;
    if (first >= p.sequence) return;
    const int64_t count = p.sequence - first < queries ? p.sequence - first : queries;
    void* memory = ::operator new(Buffers::size(p.head_size) * sizeof(float), kAlignment);
    attend<T>(p, head / p.heads, head % p.heads, first, count, Buffers(static_cast<float*>(memory), p.head_size));
    ::operator delete(memory, kAlignment);
  });
}

}  // namespace

void multi_head_attention(const MultiHeadAttentionParams& params, const Parallel& parallel) {
  by_type(params.dtype, [&](auto sample) { run<decltype(sample)>(params, parallel); });
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
