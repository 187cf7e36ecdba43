// Shared parts of the MultiHeadAttention kernels: flash attention (Dao et al., "FlashAttention-2", 2023). A block
// computes some queries of one head and iterates over the keys in tiles with an online softmax to base 2; the S x L
// scores are never stored. Device code, and the common launch.
#pragma once

#include <limits>

#include "common/divisor.h"
#include "common/gpu.h"
#include "common/math.h"
#include "common/mma.h"
#include "common/quantized_output.h"
#include "common/reduce.h"
#include "operators/multi_head_attention/kernels/tiles.h"
#include "operators/multi_head_attention/op.h"

namespace sd_ort {

// Sizes and strides in elements, as one kernel argument.
struct AttentionShape {
  int32_t heads;
  int32_t sequence;
  int32_t kv_sequence;
  int32_t head_size;
  float scale;
  int32_t causal;
  int64_t query_batch_stride;
  int64_t query_row_stride;
  int64_t query_head_stride;
  int64_t key_batch_stride;
  int64_t key_row_stride;
  int64_t key_head_stride;
  int64_t value_batch_stride;
  int64_t value_row_stride;
  int64_t value_head_stride;
  int64_t bias_batch_stride;
  int64_t bias_head_stride;
  Divisor group{1};  // query heads per head of key and value
};

namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargestFloat = 3.4028234663852886e38f;

// Rows of one head of query, key or value in global memory. Rows are aligned to 16 bytes, columns are a multiple of 8,
// and the range is under 4 GB: an address is a wave-uniform pointer plus a 32-bit offset of the lane.
template <class T>
struct Rows {
  const T* data;
  uint32_t stride;
  int rows;
  int columns;
  int first_column = 0;

  // View starting at `row`, which must exist, and `column`, which may be outside.
  __device__ Rows from(int row) const {
    return {data + static_cast<int64_t>(row) * stride, stride, rows - row, columns, first_column};
  }
  __device__ Rows columns_from(int column) const { return {data, stride, rows, columns, first_column + column}; }

  __device__ bool holds(int row, int column) const { return row < rows && first_column + column < columns; }
  __device__ uint32_t offset(int row, int column) const {
    return static_cast<uint32_t>(row) * stride + first_column + column;
  }
  __device__ const T* at(uint32_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(data) + offset * static_cast<uint32_t>(sizeof(T)));
  }

  // Loads N adjacent elements at offset(row, column), zeros if not valid: masks the first elements instead of a branch,
  // which would delay other loads.
  template <int N>
  __device__ Vec<T, N> load(uint32_t offset, bool valid) const {
    const uint32_t mask = valid ? 0xffffffffu : 0u;
    uint32_t bits[N / 2];
    const auto loaded = Vec<T, N>::load(at(valid ? offset : 0));
    memcpy(bits, &loaded.raw, sizeof(bits));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) bits[i] &= mask;
    Vec<T, N> vec;
    memcpy(&vec.raw, bits, sizeof(bits));
    return vec;
  }
};

// Copies a tile of kRows x kColumns to LDS: begin() starts the loads, finish() stores them. On NVIDIA the copies write
// LDS in between, so begin() requires a free tile.
template <class T, int kRows, int kColumns, int kThreads>
class RowTile {
 public:
  static constexpr int kStride = kColumns + mma::kPadding;
  static constexpr int kSize = kRows * kStride;

  __device__ explicit RowTile(T* lds) : lds_(lds) {}
  __device__ void place(T* lds) { lds_ = lds; }

  __device__ void begin(const Rows<T>& from) {
    const int row = first_row(), column = first_column();
    uint32_t offset = from.offset(row, column);
#pragma unroll
    for (int i = 0; i < kSteps; ++i, offset += kRowsAStep * from.stride) {
      const bool valid = from.holds(row + i * kRowsAStep, column);
#if defined(SD_ORT_MMA_NVIDIA)
      T* to = lds_ + (row + i * kRowsAStep) * kStride + column;
      mma::copy_16_bytes_async(to, from.at(valid ? offset : 0), valid, in_tile(i));
#else
      pieces_[i] = from.template load<8>(offset, valid);
#endif
    }
  }

  __device__ void finish() {
#if defined(SD_ORT_MMA_NVIDIA)
    mma::wait_for_copies();
#else
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!in_tile(i)) continue;
      T* to = lds_ + (first_row() + i * kRowsAStep) * kStride + first_column();
      memcpy(__builtin_assume_aligned(to, mma::kPadding * sizeof(T)), &pieces_[i].raw, 16);
    }
#endif
  }

  // Loads the 16 x 16 operand at (row, column).
  __device__ mma::Operand<T> operand(int row, int column) const {
    return mma::load_operand(lds_ + row * kStride + column, kStride);
  }

 protected:
  // Lanes per row, 16 bytes each: the column and row step of a lane are fixed, so an address needs one addition. Excess
  // lanes do nothing.
  static constexpr int kLanesARow = kColumns / 8;
  static constexpr int kRowsAStep = kThreads / kLanesARow < kRows ? kThreads / kLanesARow : kRows;
  static constexpr int kSteps = (kRows + kRowsAStep - 1) / kRowsAStep;

  __device__ static int first_row() { return threadIdx.x / kLanesARow; }
  __device__ static int first_column() { return threadIdx.x % kLanesARow * 8; }
  __device__ static bool in_tile(int step) {
    return (kRowsAStep * kLanesARow == kThreads || first_row() < kRowsAStep) &&
           (kRows % kRowsAStep == 0 || first_row() + step * kRowsAStep < kRows);
  }

  T* lds_;
#if !defined(SD_ORT_MMA_NVIDIA)
  Vec<T, 8> pieces_[kSteps];
#endif
};

#if defined(SD_ORT_MMA_NVIDIA)
// A tile of values, loaded as operands with rows as depth: ldmatrix transposes.
template <class T, int kRows, int kColumns, int kThreads>
class ColumnTile : public RowTile<T, kRows, kColumns, kThreads> {
 public:
  using RowTile<T, kRows, kColumns, kThreads>::RowTile;

  // Loads the 16 x 16 operand at `column`, with rows starting at `row` as depth.
  __device__ mma::Operand<T> operand(int column, int row) const {
    return mma::load_operand_transposed(this->lds_ + row * this->kStride + column, this->kStride);
  }
};
#else
// A tile of values, transposed when it is written to LDS: a thread copies patches of 4 rows x 8 columns.
template <class T, int kRows, int kColumns, int kThreads>
class ColumnTile {
 public:
  static constexpr int kStride = kRows + mma::kPadding;
  static constexpr int kSize = kColumns * kStride;

  __device__ explicit ColumnTile(T* lds) : lds_(lds) {}
  __device__ void place(T* lds) { lds_ = lds; }

  __device__ void begin(const Rows<T>& from) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int patch = thread + i * kThreads, row = patch_row(patch), column = patch_column(patch);
      uint32_t offset = from.offset(row, column);
#pragma unroll
      for (int r = 0; r < 4; ++r, offset += from.stride) {
        patches_[i][r] = from.template load<8>(offset, from.holds(row + r, column));
      }
    }
  }

  __device__ void finish() {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int patch = thread + i * kThreads;
      if (kPatches % kThreads != 0 && patch >= kPatches) break;
      uint32_t rows[4][4];
      memcpy(rows, patches_[i], sizeof(rows));
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        uint32_t items[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) items[row] = rows[row][column / 2] >> (16 * (column % 2)) & 0xffffu;
        const uint2 packed = {items[0] | items[1] << 16, items[2] | items[3] << 16};
        *reinterpret_cast<uint2*>(lds_ + (patch_column(patch) + column) * kStride + patch_row(patch)) = packed;
      }
    }
  }

  __device__ mma::Operand<T> operand(int column, int row) const {
    return mma::load_operand(lds_ + column * kStride + row, kStride);
  }

 private:
  // Lanes iterate over four rows of patches, then over columns: 64 bytes of a row are read together, and writes of 16
  // lanes use a bank at most twice.
  static constexpr int kPatches = kRows / 4 * (kColumns / 8);
  static constexpr int kSteps = (kPatches + kThreads - 1) / kThreads;
  static constexpr int kGroup = 4;
  __device__ static int patch_row(int patch) {
    return (patch % kGroup + patch / (kGroup * (kColumns / 8)) * kGroup) * 4;
  }
  __device__ static int patch_column(int patch) { return patch / kGroup % (kColumns / 8) * 8; }

  T* lds_;
  Vec<T, 8> patches_[kSteps][4];
};
#endif

// Softmax state per query: the running maximum of the scores (base 2), and the sum of 2^(score - maximum) over the keys
// of the lane.
struct SoftmaxState {
  float largest[mma::kRowsPerLane];
  float sum[mma::kRowsPerLane];
};

template <int kRows, int kColumns>
__device__ inline void settle_all(mma::Accumulator (&tiles)[kRows][kColumns]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) mma::settle(tiles[row][column]);
  }
}

template <int kRowTiles>
__device__ inline void reset(SoftmaxState (&state)[kRowTiles]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      state[m].largest[slot] = -INFINITY;
      state[m].sum[slot] = 0.f;
    }
  }
}

// Largest element of each row of the lane.
template <int kTiles>
__device__ inline void row_maxima(const mma::Accumulator (&scores)[kTiles], float (&largest)[mma::kRowsPerLane]) {
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) largest[slot] = -INFINITY;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < mma::kAccumulatorSize; ++i) {
      largest[mma::row_slot(i)] = fmaxf(largest[mma::row_slot(i)], scores[tile].x[i]);
    }
  }
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) largest[slot] = mma::reduce_row<Max>(largest[slot]);
}

// scores * factor are logarithms to base 2, `largest` the row maxima of this step. Replaces scores by
// 2^(score - running maximum) and updates the state. Rows of only -infinity stay zero. If this returns true, earlier
// results must be scaled by `rescale`.
template <int kKeyTiles>
__device__ inline bool softmax_scores(mma::Accumulator (&scores)[kKeyTiles], const float (&largest)[mma::kRowsPerLane],
                                      float factor, SoftmaxState& state, float (&rescale)[mma::kRowsPerLane]) {
  float shift[mma::kRowsPerLane];
  bool moved = false;
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
    const float updated = fmaxf(state.largest[slot], largest[slot] * factor);
    shift[slot] = updated == -INFINITY ? 0.f : updated;
    rescale[slot] = power_of_two(state.largest[slot] - shift[slot]);
    moved |= rescale[slot] != 1.f;
    state.largest[slot] = updated;
    state.sum[slot] *= rescale[slot];
  }
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < mma::kAccumulatorSize; ++i) {
      const int slot = mma::row_slot(i);
      scores[tile].x[i] = power_of_two(fmaf(scores[tile].x[i], factor, -shift[slot]));
      state.sum[slot] += scores[tile].x[i];
    }
  }
  return moved;
}

// Updates the state and scales `output`.
template <int kKeyTiles, int kHeadTiles>
__device__ inline void softmax_step(mma::Accumulator (&scores)[kKeyTiles], const float (&largest)[mma::kRowsPerLane],
                                    float factor, SoftmaxState& state, mma::Accumulator (&output)[kHeadTiles]) {
  float rescale[mma::kRowsPerLane];
  if (softmax_scores(scores, largest, factor, state, rescale)) {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) output[tile].x[i] *= rescale[mma::row_slot(i)];
    }
  }
}

// Masking of a tile: attention_bias, the causal boundary, and the end of the keys.
template <class T>
struct ScoreEdges {
  const T* bias;  // of the batch and head
  bool has_bias;
  int queries;
  int keys;
  float scale;
  int causal;

  // Whether scores need more than a positive factor: if so, call apply() on all tiles, else hide() on partial tiles.
  __device__ bool general() const { return has_bias || !(scale > 0.f); }
  // Factor that converts raw or applied scores to logarithms to base 2.
  __device__ float factor() const { return general() ? 1.f : scale * kLog2E; }
  // Whether every query from `first_query` on attends to keys up to `last_key`.
  __device__ bool all_visible(int first_query, int last_key) const {
    return last_key < keys && (!causal || last_key <= first_query);
  }

  // attention_bias of a query, if any; queries beyond the last use the row of the last. Never null: a choice with null
  // would hide from AMD's compiler that this is global memory.
  __device__ const T* bias_row(int query) const { return bias + static_cast<int64_t>(min(query, queries - 1)) * keys; }

  // Converts a raw score to a logarithm to base 2, -infinity if the key is hidden. Large negative finite biases stay
  // finite: a row where all keys have one is their mean, as in exact arithmetic.
  __device__ float apply(float score, const T* bias_row, int query, int key) const {
    if (key >= keys || (causal && key > query)) return -INFINITY;
    float x = score * scale;
    if (has_bias) x += to_float(bias_row[key]);
    if (x == -INFINITY) return x;
    x *= kLog2E;
    return x < -kLargestFloat ? -kLargestFloat : x;  // not fmaxf, which would drop NaN
  }

  // apply() and hide() for accumulators that begin at (query, key).
  template <int kTiles>
  __device__ void hide(mma::Accumulator (&scores)[kTiles], int query, int key) const {
    const int lane = mma::lane_id();
    int visible[mma::kRowsPerLane];  // visible keys of this tile per row
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      visible[slot] = (causal ? min(keys, query + mma::slot_row(lane, slot) + 1) : keys) - key;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t column = tile * mma::kTile;
      launder(column);  // recompute comparisons: the masks of all tiles exceed the scalar registers
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) {
        const bool seen = static_cast<int>(column) + mma::accumulator_column(lane, i) < visible[mma::row_slot(i)];
        scores[tile].x[i] = seen ? scores[tile].x[i] : -INFINITY;
      }
    }
  }
  template <int kTiles>
  __device__ void apply(mma::Accumulator (&scores)[kTiles], int query, int key) const {
    const int lane = mma::lane_id();
    const T* rows[mma::kRowsPerLane];
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) rows[slot] = bias_row(query + mma::slot_row(lane, slot));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t column = key + tile * mma::kTile;
      launder(column);  // see above
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) {
        scores[tile].x[i] = apply(scores[tile].x[i], rows[mma::row_slot(i)], query + mma::accumulator_row(lane, i),
                                  static_cast<int>(column) + mma::accumulator_column(lane, i));
      }
    }
  }
};

// A 16 x 16 tile of rows in global memory.
template <class T>
__device__ inline mma::Pieces load_tile(const Rows<T>& rows, int first_row, int first_column) {
  const int lane = mma::lane_id();
  mma::Pieces pieces;
#pragma unroll
  for (int i = 0; i < mma::kPieces; ++i) {
    const int row = first_row + mma::piece_row(lane, i), column = first_column + mma::piece_column(lane, i);
    const auto piece = rows.template load<mma::kPieceSize>(rows.offset(row, column), rows.holds(row, column));
    uint32_t bits[mma::kPieceSize / 2];
    memcpy(bits, &piece.raw, sizeof(bits));
#pragma unroll
    for (int j = 0; j < mma::kPieceSize / 2; ++j) pieces.r[i * mma::kPieceSize / 2 + j] = bits[j];
  }
  return pieces;
}

// Calls store(row, column, vector) for the pieces of a 16 x 16 tile within the first `rows` rows and `columns` columns.
template <class T, class Store>
__device__ inline void for_each_piece(const mma::Pieces& pieces, int rows, int columns, const Store& store) {
  const int lane = mma::lane_id();
#pragma unroll
  for (int i = 0; i < mma::kPieces; ++i) {
    const int row = mma::piece_row(lane, i), column = mma::piece_column(lane, i);
    uint32_t bits[mma::kPieceSize / 2];
#pragma unroll
    for (int j = 0; j < mma::kPieceSize / 2; ++j) bits[j] = pieces.r[i * mma::kPieceSize / 2 + j];
    Vec<T, mma::kPieceSize> piece;
    memcpy(&piece.raw, bits, sizeof(bits));
    if (row < rows && column < columns) store(row, column, piece);
  }
}

// Writes the part of a 16 x 16 tile within the first `rows` rows and `columns` columns at `to`.
template <class T>
__device__ inline void store_tile(const mma::Pieces& pieces, T* to, int64_t stride, int rows, int columns) {
  for_each_piece<T>(pieces, rows, columns,
                    [&](int row, int column, const auto& piece) { piece.store(to + row * stride + column); });
}
// The same at element `at` of the output.
template <class T>
__device__ inline void store_tile(const mma::Pieces& pieces, const QuantizedOutput<T>& to, int64_t at, int64_t stride,
                                  int rows, int columns) {
  for_each_piece<T>(pieces, rows, columns,
                    [&](int row, int column, const auto& piece) { to.store(at + row * stride + column, piece); });
}

// One head of one sample, the work of a block.
template <class T>
struct Head {
  Rows<T> query;
  Rows<T> key;
  Rows<T> value;
  ScoreEdges<T> edges;

  __device__ Head(const T* query, const T* key, const T* value, const T* attention_bias, const AttentionShape& shape)
      : query{query + at(shape.query_batch_stride, shape.query_head_stride, blockIdx.y),
              static_cast<uint32_t>(shape.query_row_stride), shape.sequence, shape.head_size},
        key{key + at(shape.key_batch_stride, shape.key_head_stride, kv_head(shape)),
            static_cast<uint32_t>(shape.key_row_stride), shape.kv_sequence, shape.head_size},
        value{value + at(shape.value_batch_stride, shape.value_head_stride, kv_head(shape)),
              static_cast<uint32_t>(shape.value_row_stride), shape.kv_sequence, shape.head_size},
        edges{attention_bias + at(shape.bias_batch_stride, shape.bias_head_stride, blockIdx.y),
              attention_bias != nullptr,
              shape.sequence,
              shape.kv_sequence,
              shape.scale,
              shape.causal} {}

  __device__ static uint32_t kv_head(const AttentionShape& shape) { return shape.group.divide(blockIdx.y); }
  __device__ static int64_t at(int64_t batch_stride, int64_t head_stride, uint32_t head) {
    return blockIdx.z * batch_stride + head * head_stride;
  }
};

// Element at which row `row` of this head begins in the output (batch, sequence, heads * head_size).
__device__ inline int64_t output_row(const AttentionShape& shape, int row) {
  const int64_t stride = static_cast<int64_t>(shape.heads) * shape.head_size;
  return (static_cast<int64_t>(blockIdx.z) * shape.sequence + row) * stride +
         static_cast<int64_t>(blockIdx.y) * shape.head_size;
}

// Range of keys that any query of the block attends to.
__device__ inline int keys_seen(const AttentionShape& shape, int first, int count) {
  return shape.causal ? min(shape.kv_sequence, first + count) : shape.kv_sequence;
}

// Launches any of the kernels, which have the same arguments.
template <class T>
using AttentionKernel = void(const T*, const T*, const T*, const T*, QuantizedOutput<T>, AttentionShape);

template <class T>
const char* launch_attention(AttentionKernel<T>* kernel, const MultiHeadAttentionParams& p, int64_t blocks_per_head,
                             int threads, void* stream, size_t lds_bytes = 0) {
  AttentionShape shape{};
  shape.heads = static_cast<int32_t>(p.heads);
  shape.sequence = static_cast<int32_t>(p.sequence);
  shape.kv_sequence = static_cast<int32_t>(p.kv_sequence);
  shape.head_size = static_cast<int32_t>(p.head_size);
  shape.query_batch_stride = p.query.batch_stride;
  shape.query_row_stride = p.query.row_stride;
  shape.query_head_stride = p.query.head_stride;
  shape.key_batch_stride = p.key.batch_stride;
  shape.key_row_stride = p.key.row_stride;
  shape.key_head_stride = p.key.head_stride;
  shape.value_batch_stride = p.value.batch_stride;
  shape.value_row_stride = p.value.row_stride;
  shape.value_head_stride = p.value.head_stride;
  shape.bias_batch_stride = p.bias_batch_stride;
  shape.bias_head_stride = p.bias_head_stride;
  // Canonical NaN: AMD's rounding to bfloat16 turns NaNs with low bits into numbers.
  shape.scale = p.scale == p.scale ? p.scale : std::numeric_limits<float>::quiet_NaN();
  shape.causal = p.causal;
  shape.group = Divisor(static_cast<uint32_t>(p.heads / p.kv_heads));
  return launch(kernel, dim3(blocks_per_head, p.heads, p.batch), dim3(threads), lds_bytes, stream,
                static_cast<const T*>(p.query.data), static_cast<const T*>(p.key.data),
                static_cast<const T*>(p.value.data), static_cast<const T*>(p.attention_bias),
                QuantizedOutput<T>(p.output, p.quantized), shape);
}

}  // namespace
}  // namespace sd_ort
