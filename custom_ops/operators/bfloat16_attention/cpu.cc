// Bfloat16Attention on the CPU: flash attention in blocks of GEMMs. Keys are the rows of the first GEMM and 32 queries
// its columns, so that the softmax of a query stays in one vector lane, and pairs of keys are in the order in which the
// second GEMM (values by weights) reads them. Scores are logarithms to base 2.
#include "common/cpu.h"

#include <cfloat>
#include <cmath>

#include "common/tiles.h"
#include "operators/bfloat16_attention/op.h"

namespace sd_ort {
namespace SD_ORT_ISA {
namespace {

constexpr int64_t kQueries = kBlockColumns;  // queries of a block column: two panels
constexpr int64_t kGroup = 4;                // block columns per task, which share cached keys and values
constexpr int64_t kKeys = 128;               // keys per step
constexpr int64_t kSide = 16;
constexpr int64_t kVectors = kQueries / kLanes;
constexpr float kLog2E = 1.4426950408889634f;
// Weights of a query are 2^(score - reference). The reference is raised, and the sums are rescaled, only if a score
// exceeds it by more than this.
constexpr float kSlack = 8.f;

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= kSlack with a relative error of 2^-13, at least 2^-126; NaN stays NaN. The polynomial has the least
// relative error of 2^f for 0 <= f <= 1.
Floats power_of_two(Floats x) {
  const Floats clamped = x < splat(-126.f) ? splat(-126.f) : x;
#if defined(__AVX512F__)
  const Floats f = (Floats)_mm512_maskz_reduce_ps(0xffff, (__m512)clamped, 0x09);  // clamped - floor(clamped)
#else
  const Floats shifter = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats near = (clamped + shifter) - shifter;
  const Floats floor = near - (near > clamped ? splat(1.f) : splat(0.f));
  const Floats f = clamped - floor;
#endif
  Floats p = splat(0.07802452f);
  p = p * f + splat(0.22606716f);
  p = p * f + splat(0.69583354f);
  p = p * f + splat(0.99992522f);
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)clamped);  // p * 2^floor(clamped)
#else
  const Floats power = (Floats)((Ints)p + (__builtin_convertvector(floor, Ints) << 23));
  return x == x ? power : x;  // the exponent bits could turn NaN into a number
#endif
}

template <class T>
const T* head_of(const HeadsView& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
}

struct Sizes {
  int64_t depth, keys, depth_blocks;  // head size and keys, padded to blocks of 32

  explicit Sizes(const MultiHeadAttentionParams& p)
      : depth(round_up(p.head_size, kBlockDepth)),
        keys(round_up(p.kv_sequence, kBlockDepth)),
        depth_blocks(depth / kBlockDepth) {}
  int64_t elements() const { return depth * keys; }  // of the keys or values of a head
};

// Packs keys `first` to `first` + 31 of a head as rows of the first GEMM, and values as depths of the second, whose
// rows are the transposed values: [block of 32 keys][row][32 keys].
template <class T>
void pack_keys_and_values(const MultiHeadAttentionParams& p, const Sizes& sizes, int64_t batch, int64_t head,
                          int64_t first, uint16_t* keys, uint16_t* values) {
  const T* key = head_of<T>(p.key, batch, head, 0);
  const T* value = head_of<T>(p.value, batch, head, 0);
  uint16_t* rows = values + first * sizes.depth;
  alignas(64) uint16_t even[kBlockDepth], odd[kBlockDepth];
  alignas(64) uint32_t pairs[2][kSide * kSide];  // [pair of keys][depth], of each half of 32 depths
  for (int64_t block = 0; block < sizes.depth_blocks; ++block) {
    const int64_t depth = block * kBlockDepth;
    for (int64_t i = 0; i < kBlockDepth; i += 2) {
      for (int64_t k = first + i; k < first + i + 2; ++k) {
        const int64_t count = k < p.kv_sequence ? p.head_size - depth : 0;
        round_row(key + (count > 0 ? k * p.key.row_stride + depth : 0), count,
                  keys + (block * sizes.keys + k) * kBlockDepth);
        round_row(value + (count > 0 ? k * p.value.row_stride + depth : 0), count, k % 2 == 0 ? even : odd);
      }
      for (int64_t d = 0; d < kBlockDepth; ++d) {
        pairs[d / kSide][i / 2 * kSide + d % kSide] = even[d] | static_cast<uint32_t>(odd[d]) << 16;
      }
    }
    for (int64_t half = 0; half < 2; ++half) {
      uint16_t* to = rows + (depth + half * kSide) * kBlockDepth;
      transpose_16(pairs[half], kSide, reinterpret_cast<uint32_t*>(to), kSide);
    }
  }
}

// Packs queries `first` to `first` + 31 as two panels of columns, with the sign of the scale.
template <class T>
void pack_queries(const MultiHeadAttentionParams& p, const Sizes& sizes, int64_t batch, int64_t head, int64_t first,
                  uint16_t* to) {
  const uint32_t sign = p.scale < 0 ? 0x80008000u : 0;
  alignas(64) uint32_t rows[kSide * kSide];  // [query][pair of depths]
  for (int64_t query = first; query < first + kQueries; query += kSide) {
    for (int64_t depth = 0; depth < sizes.depth; depth += kBlockDepth, to += kBlockElements) {
      for (int64_t i = 0; i < kSide; ++i) {
        const bool exists = query + i < p.sequence;
        round_row(head_of<T>(p.query, batch, head, exists ? query + i : 0) + (exists ? depth : 0),
                  exists ? p.head_size - depth : 0, reinterpret_cast<uint16_t*>(rows + i * kSide));
      }
      for (int64_t i = 0; i < kSide * kSide; ++i) rows[i] ^= sign;
      transpose_16(rows, kSide, reinterpret_cast<uint32_t*>(to), kSide);
    }
  }
}

// Softmax state of 32 queries.
struct State {
  alignas(64) float reference[kQueries], sum[kQueries];
  alignas(64) uint16_t weights[kKeys * kQueries];
};

// Largest score of each query over `count` rows of scores (even). NaN is ignored or stays.
void find_largest(const float* scores, int64_t count, Floats (&most)[kVectors]) {
  Floats odd[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) {
    most[v] = load(scores + v * kLanes);
    odd[v] = load(scores + kQueries + v * kLanes);
  }
  for (int64_t key = 2; key < count; key += 2) {
    for (int64_t v = 0; v < kVectors; ++v) {
      most[v] = larger(load(scores + key * kQueries + v * kLanes), most[v]);
      odd[v] = larger(load(scores + (key + 1) * kQueries + v * kLanes), odd[v]);
    }
  }
  for (int64_t v = 0; v < kVectors; ++v) most[v] = larger(odd[v], most[v]);
}

// Raises the references to the largest scores if one exceeds its reference by more than kSlack.
void raise(const Floats (&most)[kVectors], float scale, int64_t depth, State& state, float* output) {
  bool passed = false;
  for (int64_t v = 0; v < kVectors; ++v) {
    passed |= largest((most[v] - load(state.reference + v * kLanes)) * splat(scale)) > kSlack;
  }
  if (!passed) return;
  for (int64_t v = 0; v < kVectors; ++v) {
    const Floats before = load(state.reference + v * kLanes), now = larger(most[v], before);
    const Floats factor = power_of_two((before - now) * splat(scale));
    store(state.reference + v * kLanes, now);
    store(state.sum + v * kLanes, load(state.sum + v * kLanes) * factor);
    for (int64_t d = 0; d < depth; ++d) {
      float* at = output + d * kQueries + v * kLanes;
      store(at, load(at) * factor);
    }
  }
}

// Converts the scores of `count` keys (even) to weights, two panels [block of keys][pair][query][2], and adds their
// sums.
void weigh(const float* scores, int64_t count, float scale, State& state) {
  const int64_t each = count / kBlockDepth * kBlockElements;
  for (int64_t v = 0; v < kVectors; ++v) {
    const int64_t column = v * kLanes;
    uint16_t* to = state.weights + column / kPanelColumns * each + column % kPanelColumns * 2;
    const Floats factor = splat(scale), zero = load(state.reference + column) * factor;
    Floats sums[2] = {load(state.sum + column), splat(0.f)};
    for (int64_t key = 0; key < count; key += 2, to += 2 * kPanelColumns) {
      const Floats even = power_of_two(load(scores + key * kQueries + column) * factor - zero);
      const Floats odd = power_of_two(load(scores + (key + 1) * kQueries + column) * factor - zero);
      sums[0] += even;
      sums[1] += odd;
      // Rounded to nearest, ties away from zero; the sum preserves NaN.
      const Ints low = (Ints)((Words)((Ints)even + 0x8000) >> 16);
      const Ints both = low | (((Ints)odd + 0x8000) & static_cast<int32_t>(0xffff0000u));
      memcpy(to, &both, sizeof(both));
    }
    store(state.sum + column, sums[0] + sums[1]);
  }
}

// Writes queries `first` to `first` + 31 of the output from sums [depth][query].
template <class T>
void write(const MultiHeadAttentionParams& p, const Sizes& sizes, int64_t batch, int64_t head, int64_t first,
           const State& state, const float* output) {
  alignas(64) float rows[kSide * kSide];
  for (int64_t query = 0; query < kQueries && first + query < p.sequence; query += kSide) {
    const int64_t queries = p.sequence - first - query < kSide ? p.sequence - first - query : kSide;
    for (int64_t depth = 0; depth < sizes.depth && depth < p.head_size; depth += kSide) {
      transpose_16(output + depth * kQueries + query, kQueries, rows, kSide);
      for (int64_t q = 0; q < queries; ++q) {
        const float sum = state.sum[query + q];
        const Floats inverse = splat(sum == 0.f ? 0.f : 1.f / sum);  // no keys
        T* to = static_cast<T*>(p.output) + ((batch * p.sequence + first + query + q) * p.heads + head) * p.head_size;
        for (int64_t i = 0; i < kSide && depth + i < p.head_size; i += kLanes) {
          store_up_to(to + depth + i, load(rows + q * kSide + i) * inverse, p.head_size - depth - i);
        }
      }
    }
  }
}

// Computes up to kGroup block columns of queries of a head, starting at query `first`.
template <class T>
void attend(const MultiHeadAttentionParams& p, const Sizes& sizes, int64_t batch, int64_t head, int64_t first,
            const uint16_t* keys, const uint16_t* values) {
  static thread_local ThreadScratch<uint16_t> scratch;
  const int64_t left = ceil_div(p.sequence - first, kQueries), columns = left < kGroup ? left : kGroup;
  const int64_t column = sizes.depth * kQueries;  // elements of the queries of a block column, and of its sums
  uint16_t* queries = scratch.get(column * columns * 3 + kKeys * kQueries * 2);
  float* outputs = reinterpret_cast<float*>(queries + column * columns);
  float* scores = outputs + column * columns;
  State states[kGroup];
  for (int64_t i = 0; i < columns; ++i) {
    pack_queries<T>(p, sizes, batch, head, first + i * kQueries, queries + i * column);
    for (int64_t q = 0; q < kQueries; ++q) {
      states[i].reference[q] = -FLT_MAX;
      states[i].sum[q] = 0.f;
    }
  }
  memset(outputs, 0, column * columns * sizeof(float));
  const float scale = (p.scale < 0 ? -p.scale : p.scale) * kLog2E;
  for (int64_t key = 0; key < sizes.keys; key += kKeys) {
    const int64_t count = sizes.keys - key < kKeys ? sizes.keys - key : kKeys;
    for (int64_t i = 0; i < columns; ++i) {
      const GemmBlock score = {keys, queries + i * column, sizes.keys * kBlockDepth, kBlockDepth, sizes.depth_blocks, 1,
                               {}};
      for (int64_t k = 0; k < count; k += kBlockRows) multiply_block(score, key + k, 0, scores + k * kQueries);
      for (int64_t k = p.kv_sequence - key; k < count; ++k) {
        for (int64_t v = 0; v < kQueries; v += kLanes) store(scores + k * kQueries + v, splat(-INFINITY));
      }
      float* output = outputs + i * column;
      Floats most[kVectors];
      find_largest(scores, count, most);
      raise(most, scale, sizes.depth, states[i], output);
      weigh(scores, count, scale, states[i]);
      const GemmBlock sum = {values + key * sizes.depth,
                             states[i].weights,
                             sizes.depth * kBlockDepth,
                             kBlockDepth,
                             count / kBlockDepth,
                             1,
                             {}};
      for (int64_t d = 0; d < p.head_size; d += kBlockRows) {
        p.head_size - d > 16 ? multiply_block<true>(sum, d, 0, output + d * kQueries)
                             : multiply_block<true, 16>(sum, d, 0, output + d * kQueries);
      }
    }
  }
  for (int64_t i = 0; i < columns; ++i) {
    write<T>(p, sizes, batch, head, first + i * kQueries, states[i], outputs + i * column);
  }
}

template <class T>
void run(const MultiHeadAttentionParams& p, const Parallel& parallel) {
  if (p.batch == 0 || p.heads == 0 || p.sequence == 0 || p.head_size == 0) return;
  static thread_local ThreadScratch<uint16_t> scratch;
  const Sizes sizes(p);
  const int64_t heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads, key_blocks = sizes.keys / kBlockDepth;
  uint16_t* keys = scratch.get(2 * kv_heads * sizes.elements());
  uint16_t* values = keys + kv_heads * sizes.elements();
  if (key_blocks > 0) {
    parallel(kv_heads * key_blocks, [&](size_t task) {
      const int64_t head = task / key_blocks, at = head * sizes.elements();
      pack_keys_and_values<T>(p, sizes, head / p.kv_heads, head % p.kv_heads, task % key_blocks * kBlockDepth,
                              keys + at, values + at);
    });
  }
  const int64_t groups = ceil_div(p.sequence, kGroup * kQueries);
  parallel(heads * groups, [&](size_t task) {
    const TileScope tiles;
    const int64_t head = task / groups, batch = head / p.heads;
    const int64_t at = (batch * p.kv_heads + p.kv_head(head % p.heads)) * sizes.elements();
    attend<T>(p, sizes, batch, head % p.heads, task % groups * kGroup * kQueries, keys + at, values + at);
  });
}

}  // namespace

void bfloat16_attention(const MultiHeadAttentionParams& p, const Parallel& parallel) {
  p.dtype == DType::kFloat32 ? run<float>(p, parallel) : run<BFloat>(p, parallel);
}

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
