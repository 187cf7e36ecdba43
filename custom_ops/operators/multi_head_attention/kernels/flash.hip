// MultiHeadAttention for fp16 and bf16 by matrix instructions, for heads whose output fits the registers of a wave:
// head_size <= kHead. Tiles of kShortKeys keys hold all keys: both tiles are loaded at once, without an online softmax.
//
// flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>
//   Launch: block (kThreads, 1, 1), grid (ceil(sequence / kQueries), heads, batch), no dynamic LDS.
#include "operators/multi_head_attention/kernels/attention.h"

namespace sd_ort {

__host__ __device__ constexpr bool holds_all(int keys) { return keys == MultiHeadAttentionLimits::kShortKeys; }

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
__global__ __launch_bounds__(kThreads, min_blocks(kHead, kQueries, holds_all(kKeys))) void flash_attention_kernel(
    const T* query, const T* key, const T* value, const T* attention_bias, QuantizedOutput<T> output,
    AttentionShape shape) {
  wait_for_predecessor();
  using namespace mma;
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  constexpr int kRowTiles = kQueries / kTile / kWaves;
  constexpr int kHeadTiles = kHead / kTile;
  constexpr int kKeyTiles = kKeys / kTile;
  constexpr bool kFewRegisters = kHead > (kConvertsOperands<T> ? 64 : 96), kOnce = holds_all(kKeys);
  static_assert(kRowTiles * kTile * kWaves == kQueries, "each wave computes complete tiles of queries");

  using Keys = RowTile<T, kKeys, kHead, kThreads>;
  using Values = ColumnTile<T, kKeys, kHead, kThreads>;
  alignas(16) __shared__ T key_lds[Keys::kSize];
  alignas(16) __shared__ T value_lds[Values::kSize];
  Keys keys(key_lds);
  Values values(value_lds);

  const int first_query = blockIdx.x * kQueries;
  const int wave_query = first_query + threadIdx.x / SD_ORT_WAVE_SIZE * kRowTiles * kTile;
  const Head<T> head(query, key, value, attention_bias, shape);
  const ScoreEdges<T>& edges = head.edges;

  keys.begin(head.key);
  if constexpr (kOnce) values.begin(head.value);
  HeldOperand<T, kFewRegisters> queries[kRowTiles][kHeadTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      queries[m][h].hold(load_tile(head.query, wave_query + m * kTile, h * kTile));
    }
  }

  SoftmaxState state[kRowTiles];
  reset(state);
  Accumulator out[kRowTiles][kHeadTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) zero(out[m][h]);
  }

  const int end = kOnce ? kKeys : keys_seen(shape, first_query, kQueries);
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    keys.finish();
    if constexpr (kOnce) values.finish();
    block_barrier();
    if constexpr (!kOnce) values.begin(head.value.from(first_key));

    Accumulator scores[kRowTiles][kKeyTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) zero(scores[m][k]);
    }
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      Operand<T> rows[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) rows[m] = queries[m][h].get();
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
        const Operand<T> operand = keys.operand(k * kTile, h * kTile);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) multiply_add(scores[m][k], rows[m], operand);
        if (kFewRegisters) schedule_barrier();
      }
      schedule_barrier();
    }

    const bool all_visible = edges.all_visible(first_query, first_key + kKeys - 1);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (edges.general()) {
        edges.apply(scores[m], wave_query + m * kTile, first_key);
      } else if (!all_visible) {
        edges.hide(scores[m], wave_query + m * kTile, first_key);
      }
      float largest[kRowsPerLane];
      row_maxima(scores[m], largest);
      if constexpr (kOnce) {
        float unused[kRowsPerLane];
        softmax_scores(scores[m], largest, edges.factor(), state[m], unused);
      } else {
        softmax_step(scores[m], largest, edges.factor(), state[m], out[m]);
      }
    }

    if constexpr (!kOnce) {
      values.finish();
      block_barrier();
      if (first_key + kKeys < end) keys.begin(head.key.from(first_key + kKeys));
    }
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      Operand<T> weights[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) weights[m] = to_operand<T>(scores[m][k]);
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        const Operand<T> operand = values.operand(h * kTile, k * kTile);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) multiply_add(out[m][h], weights[m], operand);
        if (kFewRegisters && h % 2 == 1) schedule_barrier();
      }
      schedule_barrier();
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float inverse[kRowsPerLane];
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      const float total = reduce_row<Sum>(state[m].sum[slot]);
      inverse[slot] = total == 0.f ? 0.f : 1.f / total;
    }
    const int row = wave_query + m * kTile;
    const int64_t stride = static_cast<int64_t>(shape.heads) * shape.head_size;
    const int64_t to = output_row(shape, row);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) out[m][h].x[i] *= inverse[row_slot(i)];
      store_tile(to_pieces<T>(out[m][h]), output, to + h * kTile, stride, shape.sequence - row,
                 shape.head_size - h * kTile);
    }
  }
}

namespace {

constexpr int64_t kLargestShortHead = MultiHeadAttentionLimits::kShortHead;

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
const char* launch_flash(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>, p,
                             ceil_div(p.sequence, kQueries), kThreads, stream);
}

template <class T, int kHead, MultiHeadAttentionKernel kKernel>
const char* run_tile(const MultiHeadAttentionParams& p, void* stream) {
  constexpr AttentionTile kTile = flash_tile(kKernel, kHead);
  return launch_flash<T, kHead, kTile.queries, kTile.keys, kTile.threads>(p, stream);
}

template <class T, int kHead>
const char* run_flash(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel, void* stream) {
  if (kernel == MultiHeadAttentionKernel::kLarge)
    return run_tile<T, kHead, MultiHeadAttentionKernel::kLarge>(p, stream);
  if constexpr (kHead <= kLargestShortHead) {
    if (kernel == MultiHeadAttentionKernel::kShort) {
      return run_tile<T, kHead, MultiHeadAttentionKernel::kShort>(p, stream);
    }
  }
  return run_tile<T, kHead, MultiHeadAttentionKernel::kSmall>(p, stream);
}

template <class T>
const char* run_head(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel, void* stream) {
  if (p.head_size <= 32) return run_flash<T, 32>(p, kernel, stream);
  if (p.head_size <= 48) return run_flash<T, 48>(p, kernel, stream);
  if (p.head_size <= 64) return run_flash<T, 64>(p, kernel, stream);
  if (p.head_size <= 80) return run_flash<T, 80>(p, kernel, stream);
  if (p.head_size <= 96) return run_flash<T, 96>(p, kernel, stream);
  if (p.head_size <= 128) return run_flash<T, 128>(p, kernel, stream);
  if constexpr (kLargestFlashHead > 128) return run_flash<T, kLargestFlashHead>(p, kernel, stream);
  return "no instance of this head size";
}

}  // namespace

int64_t attention_target_blocks() {
  static const int64_t blocks = blocks_that_fill(3, 400);
  return blocks;
}

int64_t attention_max_flash_head() { return kLargestFlashHead; }

const char* attention_flash(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel, void* stream) {
  return p.dtype == DType::kFloat16 ? run_head<half_t>(p, kernel, stream) : run_head<bf16_t>(p, kernel, stream);
}

}  // namespace sd_ort
