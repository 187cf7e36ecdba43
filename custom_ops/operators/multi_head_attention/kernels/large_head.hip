// MultiHeadAttention for fp16 and bf16 by matrix instructions, for large heads that all waves of a block share.
//
// large_head_attention_kernel<T, kHead, kLargestStage, kThreads>
//   Launch: block (kThreads, 1, 1), grid (ceil(sequence / 64), heads, batch), no dynamic LDS.
#include "operators/multi_head_attention/kernels/attention.h"

namespace sd_ort {

namespace {

// to[m][first + i] += rows of a wave (starting at `row`) times kColumnTiles column tiles of wave column `wave_column`,
// over a depth of kDepth, from LDS.
template <class T, int kDepth, int kColumnTiles, class RowsInLds, class ColumnsInLds, int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_tiles(const RowsInLds& rows_in_lds, const ColumnsInLds& columns_in_lds,
                                               int row, int wave_column, mma::Accumulator (&to)[kRowTiles][kTiles],
                                               int first) {
  using namespace mma;
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += kTile) {
    Operand<T> rows[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) rows[m] = rows_in_lds.operand(row + m * kTile, depth);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const Operand<T> columns = columns_in_lds.operand((wave_column * kColumnTiles + i) * kTile, depth);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) multiply_add(to[m][first + i], rows[m], columns);
    }
    schedule_barrier();
  }
}

// Converts scores to weights in LDS. Waves that share rows exchange the row maxima through row_lds, a value per row and
// wave column. Begins and ends with a barrier.
template <int kWaveColumns, int kWeightStride, class T, int kQueries, int kRowTiles, int kKeyTiles, int kOutTiles>
__device__ __forceinline__ void softmax_over_waves(mma::Accumulator (&scores)[kRowTiles][kKeyTiles],
                                                   mma::Accumulator (&out)[kRowTiles][kOutTiles],
                                                   SoftmaxState (&state)[kRowTiles], const ScoreEdges<T>& edges,
                                                   int first_query, int wave_row, int first_key, int wave_column,
                                                   int keys, float (&row_lds)[kWaveColumns][kQueries], T* weight_lds) {
  using namespace mma;
  const int lane = lane_id();
  const bool all_visible = edges.all_visible(first_query, first_key + keys - 1);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const int row = wave_row + m * kTile;
    const int wave_key = first_key + wave_column * kKeyTiles * kTile;
    if (edges.general()) {
      edges.apply(scores[m], first_query + row, wave_key);
    } else if (!all_visible) {
      edges.hide(scores[m], first_query + row, wave_key);
    }
    float largest[kRowsPerLane];
    row_maxima(scores[m], largest);
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      row_lds[wave_column][row + slot_row(lane, slot)] = largest[slot];  // lanes of a row write the same value
    }
  }
  block_barrier();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const int row = wave_row + m * kTile;
    float largest[kRowsPerLane];
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      largest[slot] = row_lds[0][row + slot_row(lane, slot)];
#pragma unroll
      for (int i = 1; i < kWaveColumns; ++i) {
        largest[slot] = fmaxf(largest[slot], row_lds[i][row + slot_row(lane, slot)]);
      }
    }
    softmax_step(scores[m], largest, edges.factor(), state[m], out[m]);
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      T* to = weight_lds + row * kWeightStride + (wave_column * kKeyTiles + k) * kTile;
      store_tile(to_pieces<T>(scores[m][k]), to, kWeightStride, kTile, kTile);
    }
  }
  block_barrier();
}

// Reciprocal of the sum of weights of each row over the waves that share it; 0 if all keys are hidden.
template <int kWaveColumns, int kQueries, int kRowTiles>
__device__ __forceinline__ void sums_over_waves(const SoftmaxState (&state)[kRowTiles], int wave_row, int wave_column,
                                                float (&row_lds)[kWaveColumns][kQueries],
                                                float (&inverse)[kRowTiles][mma::kRowsPerLane]) {
  using namespace mma;
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      const float sum = reduce_row<Sum>(state[m].sum[slot]);
      row_lds[wave_column][wave_row + m * kTile + slot_row(lane, slot)] = sum;
    }
  }
  block_barrier();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kWaveColumns; ++i) total += row_lds[i][wave_row + m * kTile + slot_row(lane, slot)];
      inverse[m][slot] = total == 0.f ? 0.f : 1.f / total;
    }
  }
}

}  // namespace

// Attention of heads whose output does not fit one wave: all waves of a block share a tile of 64 queries x 64 keys. Q,
// K and V are loaded to LDS in stages of kStage columns, each while the previous one is used; a wave computes the same
// part of every stage: its rows of the scores and its columns of the output.
template <class T, int kHead, int kLargestStage, int kThreads>
__global__ __launch_bounds__(kThreads, 1) void large_head_attention_kernel(const T* query, const T* key, const T* value,
                                                                           const T* attention_bias,
                                                                           QuantizedOutput<T> output,
                                                                           AttentionShape shape) {
  wait_for_predecessor();
  using namespace mma;
  constexpr int kQueries = 64, kKeys = 64;
#if defined(SD_ORT_ACCUMULATORS_APART)
  constexpr int kStage = kHead > 256 ? 32 : kLargestStage;  // the largest output leaves too few for more
#else
  constexpr int kStage = kLargestStage;
#endif
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  constexpr int kWaveRows = kWaves > 4 ? 4 : 2, kWaveColumns = kWaves / kWaveRows;
  constexpr int kRowTiles = kQueries / kTile / kWaveRows;
  constexpr int kKeyTiles = kKeys / kTile / kWaveColumns;      // key tiles of the scores
  constexpr int kColumnTiles = kStage / kTile / kWaveColumns;  // column tiles of a stage of the output
  constexpr int kStages = kHead / kStage;
  static_assert(kColumnTiles >= 1 && kStages * kStage == kHead, "complete stages, some columns for each wave");

  using QueryTile = RowTile<T, kQueries, kStage, kThreads>;
  using KeyTile = RowTile<T, kKeys, kStage, kThreads>;
  using ValueTile = ColumnTile<T, kKeys, kStage, kThreads>;
  using WeightTile = RowTile<T, kQueries, kKeys, kThreads>;
  constexpr int kScoreStage = QueryTile::kSize + KeyTile::kSize;
  constexpr int kStageSize = kScoreStage > ValueTile::kSize ? kScoreStage : ValueTile::kSize;
  alignas(16) __shared__ T stage_lds[2][kStageSize];
  alignas(16) __shared__ T weight_lds[WeightTile::kSize];
  __shared__ float row_lds[kWaveColumns][kQueries];

  const int wave = threadIdx.x / SD_ORT_WAVE_SIZE;
  const int wave_row = wave / kWaveColumns * kRowTiles * kTile, wave_column = wave % kWaveColumns;
  const int first_query = blockIdx.x * kQueries;
  const Head<T> head(query, key, value, attention_bias, shape);
  const ScoreEdges<T>& edges = head.edges;

  QueryTile queries(stage_lds[0]);
  KeyTile keys(stage_lds[0] + QueryTile::kSize);
  ValueTile values(stage_lds[0]);
  WeightTile weights(weight_lds);

  // Stages alternate between two buffers.
  const auto begin_scores = [&](int buffer, int first_key, int stage) {
    queries.place(stage_lds[buffer]);
    keys.place(stage_lds[buffer] + QueryTile::kSize);
    queries.begin(head.query.from(first_query).columns_from(stage * kStage));
    keys.begin(head.key.from(first_key).columns_from(stage * kStage));
  };
  const auto finish_scores = [&] {
    queries.finish();
    keys.finish();
  };
  const auto begin_values = [&](int buffer, int first_key, int stage) {
    values.place(stage_lds[buffer]);
    Rows<T> rows = head.value.from(first_key).columns_from(stage * kStage);
    uint32_t columns = rows.columns;
    launder(columns);  // recompute comparisons: the masks of all stages exceed the scalar registers of CDNA
    rows.columns = static_cast<int>(columns);
#if defined(SD_ORT_ACCUMULATORS_APART)
    launder(rows.stride);  // recompute offsets: those of all stages exceed its vector registers
#endif
    values.begin(rows);
  };

  SoftmaxState state[kRowTiles];
  reset(state);
  Accumulator out[kRowTiles][kStages * kColumnTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kStages * kColumnTiles; ++i) zero(out[m][i]);
  }

  const int end = keys_seen(shape, first_query, kQueries);
  int buffer = 0;
  begin_scores(0, 0, 0);
  finish_scores();
  block_barrier();
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    Accumulator scores[kRowTiles][kKeyTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) zero(scores[m][k]);
    }
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      const QueryTile stage_queries(stage_lds[buffer]);
      const KeyTile stage_keys(stage_lds[buffer] + QueryTile::kSize);
      const bool last = stage + 1 == kStages;
      if (last) {
        begin_values(buffer ^ 1, first_key, 0);
      } else {
        begin_scores(buffer ^ 1, first_key, stage + 1);
      }
      multiply_tiles<T, kStage, kKeyTiles>(stage_queries, stage_keys, wave_row, wave_column, scores, 0);
      settle_all(scores);
      if (last) {
        values.finish();
      } else {
        finish_scores();
      }
      block_barrier();
      buffer ^= 1;
    }

    softmax_over_waves<kWaveColumns, WeightTile::kStride>(scores, out, state, edges, first_query, wave_row, first_key,
                                                          wave_column, kKeys, row_lds, weight_lds);

#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const ValueTile stage_values(stage_lds[buffer]);
      const bool last = stage + 1 == kStages;
      const bool done = last && end - first_key <= kKeys;
      if (!last) {
        begin_values(buffer ^ 1, first_key, stage + 1);
      } else if (!done) {
        begin_scores(buffer ^ 1, first_key + kKeys, 0);
      }
      multiply_tiles<T, kKeys, kColumnTiles>(weights, stage_values, wave_row, wave_column, out, stage * kColumnTiles);
      settle_all(out);
      if (!last) {
        values.finish();
      } else if (!done) {
        finish_scores();
      }
      block_barrier();
      buffer ^= 1;
    }
  }

  const int64_t stride = static_cast<int64_t>(shape.heads) * shape.head_size;
  float inverse[kRowTiles][kRowsPerLane];
  sums_over_waves<kWaveColumns>(state, wave_row, wave_column, row_lds, inverse);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const int row = first_query + wave_row + m * kTile;
    const int64_t to = output_row(shape, row);
#pragma unroll
    for (int i = 0; i < kStages * kColumnTiles; ++i) {
      Accumulator& tile = out[m][i];
#pragma unroll
      for (int j = 0; j < kAccumulatorSize; ++j) tile.x[j] *= inverse[m][row_slot(j)];
      const int column = i / kColumnTiles * kStage + (wave_column * kColumnTiles + i % kColumnTiles) * kTile;
      store_tile(to_pieces<T>(tile), output, to + column, stride, shape.sequence - row, shape.head_size - column);
    }
  }
}

namespace {

template <class T, int kHead, int kLargestStage, int kThreads>
const char* launch_wide(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(large_head_attention_kernel<T, kHead, kLargestStage, kThreads>, p,
                             ceil_div(p.sequence, 64), kThreads, stream);
}

template <class T>
const char* run_head(const MultiHeadAttentionParams& p, void* stream) {
  if constexpr (kLargestFlashHead < 160) {
    if (p.head_size <= 160) return launch_wide<T, 160, 32, wide_threads(160)>(p, stream);
  }
  if (p.head_size <= 256) return launch_wide<T, 256, 64, wide_threads(256)>(p, stream);
  return launch_wide<T, 512, 64, wide_threads(512)>(p, stream);
}

}  // namespace

const char* attention_large_head(const MultiHeadAttentionParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run_head<half_t>(p, stream) : run_head<bf16_t>(p, stream);
}

}  // namespace sd_ort
