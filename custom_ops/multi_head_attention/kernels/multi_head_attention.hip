// MultiHeadAttention on a GPU: flash attention (Dao et al., "FlashAttention-2", 2023). A block takes some queries of
// one head and walks over the keys in tiles; softmax runs online, in powers of two; the S x L scores never exist.
//
// flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>: fp16 and bf16, matrix instructions, head_size <= kHead.
//   Launch: block (kThreads, 1, 1), grid (ceil(sequence / kQueries), heads, batch), no dynamic LDS.
// wide_attention_kernel<T, kHead, kStage, kThreads>: the same for larger heads.
//   Launch: block (kThreads, 1, 1), grid (ceil(sequence / 64), heads, batch), no dynamic LDS.
// warpgroup_attention_kernel<T, kHead, kGroups>: the same on NVIDIA's warpgroup instructions (sm_90a), head_size <=
// kHead.
//   Launch: block (128 * kGroups, 1, 1), grid (ceil(sequence / (64 * kGroups)), heads, batch), dynamic LDS
//   warpgroup_lds_bytes(kHead, kGroups).
// plain_attention_kernel<T, kColumnTiles>: any type, alignment and head size, no matrix instructions.
//   Launch: block (256, 1, 1), grid (ceil(sequence / 64) * ceil(head_size / (64 * kColumnTiles)), heads, batch), no
//   dynamic LDS.
#include "common/gpu.h"
#include "common/math.h"
#include "common/mma.h"
#include "common/reduce.h"
#include "common/wgmma.h"
#include "multi_head_attention/op.h"

namespace sd_ort {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargestFloat = 3.4028234663852886e38f;

// Rows of one head of query, key or value in global memory; rows aligned to 16 bytes, columns a multiple of 8, under
// 4 GB from first to last: an address is a wave's pointer and a lane's 32-bit offset.
template <class T>
struct Rows {
  const T* data;
  uint32_t stride;
  int rows;
  int columns;
  int first_column = 0;

  // The rows from `row` on, which must exist; the columns from `column` on, which need not.
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

  // N neighbouring elements at offset(row, column), zeros when not valid: then the first element's are read and masked,
  // so that no branch keeps other loads from starting.
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

// Copies a tile of kRows x kColumns to LDS, row by row: begin() starts the loads, finish() has them written. On NVIDIA
// the copies write LDS in between, so begin() may run only when the tile is free.
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

  // The 16 x 16 operand at (row, column).
  __device__ mma::Operand<T> operand(int row, int column) const {
    return mma::load_operand(lds_ + row * kStride + column, kStride);
  }

 protected:
  // So many lanes load a row, 16 bytes each: a lane's column and the distance of its rows are fixed, and an address
  // costs an addition. Lanes too few for another row do nothing.
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
// A tile of values, read as operands whose depth is the row: ldmatrix transposes.
template <class T, int kRows, int kColumns, int kThreads>
class ColumnTile : public RowTile<T, kRows, kColumns, kThreads> {
 public:
  using RowTile<T, kRows, kColumns, kThreads>::RowTile;

  // The 16 x 16 operand of columns from `column` on, with rows from `row` on as depth.
  __device__ mma::Operand<T> operand(int column, int row) const {
    return mma::load_operand_transposed(this->lds_ + row * this->kStride + column, this->kStride);
  }
};
#else
// A tile of values, transposed on its way to LDS: a thread takes patches of 4 rows x 8 columns.
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
  // Lanes go over four rows of patches first, then over columns: 64 bytes of a row are read together, and the writes of
  // 16 lanes meet a bank twice at most.
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

// Blocks that a multiprocessor should hold, for nvcc, which spends registers to that limit. On AMD the number means
// waves, and the compiler chooses well.
constexpr int min_blocks(int head, int queries) {
#if SD_ORT_HIP
  return 1;
#else
  return queries == 64 && head <= 64 ? 3 : 1;
#endif
}

// Per query: the largest score so far, in powers of two, and the sum of 2^(score - largest) over the lane's keys.
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

// The largest element of each of the lane's rows.
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

// scores * factor are logarithms to base 2, `largest` the rows' largest of this step. Replaces scores by
// 2^(score - largest so far), updates the state, and scales `output`, which was computed with the earlier largest. A
// row of nothing but -infinity stays zero.
template <int kKeyTiles, int kHeadTiles>
__device__ inline void softmax_step(mma::Accumulator (&scores)[kKeyTiles], const float (&largest)[mma::kRowsPerLane],
                                    float factor, SoftmaxState& state, mma::Accumulator (&output)[kHeadTiles]) {
  float shift[mma::kRowsPerLane], rescale[mma::kRowsPerLane];
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
  if (moved) {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) output[tile].x[i] *= rescale[mma::row_slot(i)];
    }
  }
}

// What a tile that is no plain rectangle of scores needs: a mask, the causal edge, the end of the keys.
template <class T>
struct ScoreEdges {
  const T* bias;  // of this batch and head
  bool has_bias;
  int queries;
  int keys;
  float scale;
  int causal;

  // Whether scores need more than a positive factor: then apply() them all, else hide() in tiles that are not whole.
  __device__ bool general() const { return has_bias || !(scale > 0.f); }
  // What turns raw scores, or applied ones, into logarithms to base 2.
  __device__ float factor() const { return general() ? 1.f : scale * kLog2E; }
  // Whether every query from `first_query` on sees keys up to `last_key`.
  __device__ bool whole(int first_query, int last_key) const {
    return last_key < keys && (!causal || last_key <= first_query);
  }

  // attention_bias of a query, if any; queries past the last get the last one's, for nothing. No null pointers: chosen
  // among, they would keep AMD's compiler from seeing that this is global memory.
  __device__ const T* bias_row(int query) const { return bias + static_cast<int64_t>(min(query, queries - 1)) * keys; }

  // A raw score as a logarithm to base 2, -infinity when the key is hidden from the query. A large negative finite
  // bias stays finite: a row where all keys have it is their mean, as in plain arithmetic.
  __device__ float apply(float score, const T* bias_row, int query, int key) const {
    if (key >= keys || (causal && key > query)) return -INFINITY;
    float x = score * scale;
    if (has_bias) x += to_float(bias_row[key]);
    return x == -INFINITY ? x : fmaxf(x * kLog2E, -kLargestFloat);
  }

  // Both for accumulators that begin at (query, key).
  template <int kTiles>
  __device__ void hide(mma::Accumulator (&scores)[kTiles], int query, int key) const {
    const int lane = mma::lane_id();
    int visible[mma::kRowsPerLane];  // keys of this tile that a row sees
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      visible[slot] = (causal ? min(keys, query + mma::slot_row(lane, slot) + 1) : keys) - key;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t column = tile * mma::kTile;
      forget(column);  // compare with it anew: the masks of all tiles would take more scalar registers than there are
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
      forget(column);  // as above
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

// Writes the part of a 16 x 16 tile that lies in the first `rows` rows and `columns` columns from `to` on.
template <class T>
__device__ inline void store_tile(const mma::Pieces& pieces, T* to, int64_t stride, int rows, int columns) {
  const int lane = mma::lane_id();
#pragma unroll
  for (int i = 0; i < mma::kPieces; ++i) {
    const int row = mma::piece_row(lane, i), column = mma::piece_column(lane, i);
    uint32_t bits[mma::kPieceSize / 2];
#pragma unroll
    for (int j = 0; j < mma::kPieceSize / 2; ++j) bits[j] = pieces.r[i * mma::kPieceSize / 2 + j];
    Vec<T, mma::kPieceSize> piece;
    memcpy(&piece.raw, bits, sizeof(bits));
    if (row < rows && column < columns) piece.store(to + row * stride + column);
  }
}

}  // namespace

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
__global__ __launch_bounds__(kThreads, min_blocks(kHead, kQueries)) void flash_attention_kernel(
    const T* query, const T* key, const T* value, const T* attention_bias, T* output, int heads, int sequence,
    int kv_sequence, int head_size, int64_t query_batch_stride, int64_t query_row_stride, int64_t query_head_stride,
    int64_t key_batch_stride, int64_t key_row_stride, int64_t key_head_stride, int64_t value_batch_stride,
    int64_t value_row_stride, int64_t value_head_stride, int64_t bias_batch_stride, int64_t bias_head_stride,
    float scale, int causal) {
  using namespace mma;
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  constexpr int kRowTiles = kQueries / kTile / kWaves;
  constexpr int kHeadTiles = kHead / kTile;
  constexpr int kKeyTiles = kKeys / kTile;
  constexpr bool kFewRegisters = kHead > 96;
  static_assert(kRowTiles * kTile * kWaves == kQueries, "each wave takes whole tiles of queries");

  using Keys = RowTile<T, kKeys, kHead, kThreads>;
  using Values = ColumnTile<T, kKeys, kHead, kThreads>;
  alignas(16) __shared__ T key_lds[Keys::kSize];
  alignas(16) __shared__ T value_lds[Values::kSize];
  Keys keys(key_lds);
  Values values(value_lds);

  const int head = blockIdx.y, batch = blockIdx.z;
  const int first_query = blockIdx.x * kQueries;
  const int wave_query = first_query + threadIdx.x / SD_ORT_WAVE_SIZE * kRowTiles * kTile;
  const Rows<T> query_rows = {query + batch * query_batch_stride + head * query_head_stride,
                              static_cast<uint32_t>(query_row_stride), sequence, head_size};
  const Rows<T> key_rows = {key + batch * key_batch_stride + head * key_head_stride,
                            static_cast<uint32_t>(key_row_stride), kv_sequence, head_size};
  const Rows<T> value_rows = {value + batch * value_batch_stride + head * value_head_stride,
                              static_cast<uint32_t>(value_row_stride), kv_sequence, head_size};
  const ScoreEdges<T> edges = {attention_bias + batch * bias_batch_stride + head * bias_head_stride,
                               attention_bias != nullptr,
                               sequence,
                               kv_sequence,
                               scale,
                               causal};

  keys.begin(key_rows);
  HeldOperand<T, kFewRegisters> queries[kRowTiles][kHeadTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      queries[m][h].hold(load_tile(query_rows, wave_query + m * kTile, h * kTile));
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

  const int end = causal ? min(kv_sequence, first_query + kQueries) : kv_sequence;
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    keys.finish();
    block_barrier();
    values.begin(value_rows.from(first_key));

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

    const bool whole = edges.whole(first_query, first_key + kKeys - 1);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (edges.general()) {
        edges.apply(scores[m], wave_query + m * kTile, first_key);
      } else if (!whole) {
        edges.hide(scores[m], wave_query + m * kTile, first_key);
      }
      float largest[kRowsPerLane];
      row_maxima(scores[m], largest);
      softmax_step(scores[m], largest, edges.factor(), state[m], out[m]);
    }

    values.finish();
    block_barrier();
    if (first_key + kKeys < end) keys.begin(key_rows.from(first_key + kKeys));
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
    const int64_t stride = static_cast<int64_t>(heads) * head_size;
    T* to = output + (static_cast<int64_t>(batch) * sequence + row) * stride + head * head_size;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) out[m][h].x[i] *= inverse[row_slot(i)];
      store_tile(to_pieces<T>(out[m][h]), to + h * kTile, stride, sequence - row, head_size - h * kTile);
    }
  }
}

// Heads whose output no wave holds alone: all waves of a block share one tile of 64 queries x 64 keys. Q, K and V come
// through LDS in stages of kStage columns, each loaded while the one before is used; a wave computes the same part of
// every stage: its rows of the scores, and its columns of the output.
template <class T, int kHead, int kStage, int kThreads>
__global__ __launch_bounds__(kThreads, 1) void wide_attention_kernel(
    const T* query, const T* key, const T* value, const T* attention_bias, T* output, int heads, int sequence,
    int kv_sequence, int head_size, int64_t query_batch_stride, int64_t query_row_stride, int64_t query_head_stride,
    int64_t key_batch_stride, int64_t key_row_stride, int64_t key_head_stride, int64_t value_batch_stride,
    int64_t value_row_stride, int64_t value_head_stride, int64_t bias_batch_stride, int64_t bias_head_stride,
    float scale, int causal) {
  using namespace mma;
  constexpr int kQueries = 64, kKeys = 64;
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  constexpr int kWaveRows = kWaves > 4 ? 4 : 2, kWaveColumns = kWaves / kWaveRows;
  constexpr int kRowTiles = kQueries / kTile / kWaveRows;
  constexpr int kKeyTiles = kKeys / kTile / kWaveColumns;      // of the scores
  constexpr int kColumnTiles = kStage / kTile / kWaveColumns;  // of a stage of the output
  constexpr int kStages = kHead / kStage;
  static_assert(kColumnTiles >= 1 && kStages * kStage == kHead, "whole stages, some columns for each wave");

  using QueryTile = RowTile<T, kQueries, kStage, kThreads>;
  using KeyTile = RowTile<T, kKeys, kStage, kThreads>;
  using ValueTile = ColumnTile<T, kKeys, kStage, kThreads>;
  using WeightTile = RowTile<T, kQueries, kKeys, kThreads>;
  constexpr int kScoreStage = QueryTile::kSize + KeyTile::kSize;
  constexpr int kStageSize = kScoreStage > ValueTile::kSize ? kScoreStage : ValueTile::kSize;
  alignas(16) __shared__ T stage_lds[2][kStageSize];
  alignas(16) __shared__ T weight_lds[WeightTile::kSize];
  __shared__ float row_lds[kWaveColumns][kQueries];

  const int head = blockIdx.y, batch = blockIdx.z;
  const int lane = lane_id(), wave = threadIdx.x / SD_ORT_WAVE_SIZE;
  const int wave_row = wave / kWaveColumns * kRowTiles * kTile, wave_column = wave % kWaveColumns;
  const int first_query = blockIdx.x * kQueries;
  const Rows<T> query_rows = {query + batch * query_batch_stride + head * query_head_stride,
                              static_cast<uint32_t>(query_row_stride), sequence, head_size};
  const Rows<T> key_rows = {key + batch * key_batch_stride + head * key_head_stride,
                            static_cast<uint32_t>(key_row_stride), kv_sequence, head_size};
  const Rows<T> value_rows = {value + batch * value_batch_stride + head * value_head_stride,
                              static_cast<uint32_t>(value_row_stride), kv_sequence, head_size};
  const ScoreEdges<T> edges = {attention_bias + batch * bias_batch_stride + head * bias_head_stride,
                               attention_bias != nullptr,
                               sequence,
                               kv_sequence,
                               scale,
                               causal};

  QueryTile queries(stage_lds[0]);
  KeyTile keys(stage_lds[0] + QueryTile::kSize);
  ValueTile values(stage_lds[0]);
  WeightTile weights(weight_lds);

  // Stages use the two buffers in turn.
  const auto begin_scores = [&](int buffer, int first_key, int stage) {
    queries.place(stage_lds[buffer]);
    keys.place(stage_lds[buffer] + QueryTile::kSize);
    queries.begin(query_rows.from(first_query).columns_from(stage * kStage));
    keys.begin(key_rows.from(first_key).columns_from(stage * kStage));
  };
  const auto finish_scores = [&] {
    queries.finish();
    keys.finish();
  };
  const auto begin_values = [&](int buffer, int first_key, int stage) {
    values.place(stage_lds[buffer]);
    values.begin(value_rows.from(first_key).columns_from(stage * kStage));
  };

  SoftmaxState state[kRowTiles];
  reset(state);
  Accumulator out[kRowTiles][kStages * kColumnTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kStages * kColumnTiles; ++i) zero(out[m][i]);
  }

  const int end = causal ? min(kv_sequence, first_query + kQueries) : kv_sequence;
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
#pragma unroll
      for (int depth = 0; depth < kStage; depth += kTile) {
        Operand<T> rows[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) rows[m] = stage_queries.operand(wave_row + m * kTile, depth);
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
          const Operand<T> columns = stage_keys.operand((wave_column * kKeyTiles + k) * kTile, depth);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) multiply_add(scores[m][k], rows[m], columns);
        }
        schedule_barrier();
      }
      settle_all(scores);
      if (last) {
        values.finish();
      } else {
        finish_scores();
      }
      block_barrier();
      buffer ^= 1;
    }

    // The rows' largest scores, over the waves that share the rows.
    const bool whole = edges.whole(first_query, first_key + kKeys - 1);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = wave_row + m * kTile;
      const int wave_key = first_key + wave_column * kKeyTiles * kTile;
      if (edges.general()) {
        edges.apply(scores[m], first_query + row, wave_key);
      } else if (!whole) {
        edges.hide(scores[m], first_query + row, wave_key);
      }
      float largest[kRowsPerLane];
      row_maxima(scores[m], largest);
#pragma unroll
      for (int slot = 0; slot < kRowsPerLane; ++slot) {
        row_lds[wave_column][row + slot_row(lane, slot)] = largest[slot];  // lanes of a row write the same
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
        T* to = weight_lds + row * WeightTile::kStride + (wave_column * kKeyTiles + k) * kTile;
        store_tile(to_pieces<T>(scores[m][k]), to, WeightTile::kStride, kTile, kTile);
      }
    }
    block_barrier();

#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const ValueTile stage_values(stage_lds[buffer]);
      const bool last = stage + 1 == kStages;
      const bool done = last && first_key + kKeys >= end;
      if (!last) {
        begin_values(buffer ^ 1, first_key, stage + 1);
      } else if (!done) {
        begin_scores(buffer ^ 1, first_key + kKeys, 0);
      }
#pragma unroll
      for (int depth = 0; depth < kKeys; depth += kTile) {
        Operand<T> rows[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) rows[m] = weights.operand(wave_row + m * kTile, depth);
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          const Operand<T> columns = stage_values.operand((wave_column * kColumnTiles + i) * kTile, depth);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) multiply_add(out[m][stage * kColumnTiles + i], rows[m], columns);
        }
        schedule_barrier();
      }
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

  // The rows' sums, over the waves that share the rows.
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
    float inverse[kRowsPerLane];
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kWaveColumns; ++i) total += row_lds[i][wave_row + m * kTile + slot_row(lane, slot)];
      inverse[slot] = total == 0.f ? 0.f : 1.f / total;
    }
    const int row = first_query + wave_row + m * kTile;
    const int64_t stride = static_cast<int64_t>(heads) * head_size;
    T* to = output + (static_cast<int64_t>(batch) * sequence + row) * stride + head * head_size;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        Accumulator& tile = out[m][stage * kColumnTiles + i];
#pragma unroll
        for (int j = 0; j < kAccumulatorSize; ++j) tile.x[j] *= inverse[row_slot(j)];
        const int column = stage * kStage + (wave_column * kColumnTiles + i) * kTile;
        store_tile(to_pieces<T>(tile), to + column, stride, sequence - row, head_size - column);
      }
    }
  }
}

#if !SD_ORT_HIP
constexpr int kWarpgroupKeys = 64;  // in a tile
// Tiles in LDS: one in use, one on its way and, where there is room, one whose values are still being multiplied.
__host__ __device__ constexpr int warpgroup_stages(int head) { return head <= 64 ? 3 : 2; }
__host__ __device__ constexpr int warpgroup_panels(int head) {
  return (head + wgmma::kPanelColumns - 1) / wgmma::kPanelColumns;
}
__host__ __device__ constexpr int warpgroup_lds_bytes(int head, int groups) {
  return warpgroup_panels(head) * wgmma::kRowBytes * (64 * groups + 2 * warpgroup_stages(head) * kWarpgroupKeys);
}

// Copies kRows rows, columns up to kColumns (the rest of a panel stays as it is), to swizzled panels.
template <class T, int kRows, int kColumns, int kThreads>
class PanelTile {
 public:
  static constexpr int kPanelBytes = kRows * wgmma::kRowBytes;
  static constexpr int kBytes = warpgroup_panels(kColumns) * kPanelBytes;

  __device__ PanelTile() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int item = threadIdx.x + i * kThreads, piece = item % kPieces;
      row_[i] = item / kPieces;
      column_[i] = piece * 8;
      to_[i] = piece / 8 * kPanelBytes + wgmma::piece_offset(row_[i], piece % 8);
    }
  }
  // Rows and columns that `from` does not hold become zeros.
  __device__ void begin(char* lds, const Rows<T>& from) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool valid = from.holds(row_[i], column_[i]);
      const bool in_tile = kRows * kPieces % kThreads == 0 || row_[i] < kRows;
      mma::copy_16_bytes_async(lds + to_[i], from.at(valid ? from.offset(row_[i], column_[i]) : 0), valid, in_tile);
    }
  }

 private:
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kSteps = (kRows * kPieces + kThreads - 1) / kThreads;
  int row_[kSteps], column_[kSteps];
  uint32_t to_[kSteps];
};

// A warpgroup takes 64 queries; the warpgroups of a block share tiles of keys and values.
template <class T, int kHead, int kGroups>
__global__ __launch_bounds__(
    wgmma::kThreads* kGroups,
    kHead > 80     ? 2 / kGroups
    : kGroups == 1 ? 3
                   : 2) void warpgroup_attention_kernel(const T* query, const T* key, const T* value,
                                                        const T* attention_bias, T* output, int heads, int sequence,
                                                        int kv_sequence, int head_size, int64_t query_batch_stride,
                                                        int64_t query_row_stride, int64_t query_head_stride,
                                                        int64_t key_batch_stride, int64_t key_row_stride,
                                                        int64_t key_head_stride, int64_t value_batch_stride,
                                                        int64_t value_row_stride, int64_t value_head_stride,
                                                        int64_t bias_batch_stride, int64_t bias_head_stride,
                                                        float scale, int causal) {
#if defined(SD_ORT_WGMMA)
  using namespace mma;
  constexpr int kThreads = wgmma::kThreads * kGroups;
  constexpr int kQueries = wgmma::kRows * kGroups;
  constexpr int kKeys = kWarpgroupKeys;
  constexpr int kHeadTiles = kHead / kTile, kKeyTiles = kKeys / kTile;
  constexpr int kDepthsAPanel = wgmma::kPanelColumns / kTile;
  using Queries = PanelTile<T, kQueries, kHead, kThreads>;
  using Keys = PanelTile<T, kKeys, kHead, kThreads>;
  constexpr int kStages = warpgroup_stages(kHead);
  static_assert(Queries::kBytes + 2 * kStages * Keys::kBytes == warpgroup_lds_bytes(kHead, kGroups));
  SD_ORT_DYNAMIC_LDS(char, lds);
  char* const key_lds = lds + Queries::kBytes;
  char* const value_lds = key_lds + kStages * Keys::kBytes;

  const int head = blockIdx.y, batch = blockIdx.z;
  const int first_query = blockIdx.x * kQueries;
  const int group = threadIdx.x / wgmma::kThreads;
  const int wave_query = first_query + threadIdx.x / kWave * kTile;
  const Rows<T> query_rows = {query + batch * query_batch_stride + head * query_head_stride,
                              static_cast<uint32_t>(query_row_stride), sequence, head_size};
  const Rows<T> key_rows = {key + batch * key_batch_stride + head * key_head_stride,
                            static_cast<uint32_t>(key_row_stride), kv_sequence, head_size};
  const Rows<T> value_rows = {value + batch * value_batch_stride + head * value_head_stride,
                              static_cast<uint32_t>(value_row_stride), kv_sequence, head_size};
  const ScoreEdges<T> edges = {attention_bias + batch * bias_batch_stride + head * bias_head_stride,
                               attention_bias != nullptr,
                               sequence,
                               kv_sequence,
                               scale,
                               causal};

  const Keys tile;  // of keys or of values
  Queries().begin(lds, query_rows.from(first_query));
  tile.begin(key_lds, key_rows);
  tile.begin(value_lds, value_rows);

  SoftmaxState state[1];
  reset(state);
  Accumulator out[kHeadTiles];
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) zero(out[h]);

  const uint32_t query_address = wgmma::address_of(lds) + group * wgmma::kRows * wgmma::kRowBytes;
  const int end = causal ? min(kv_sequence, first_query + kQueries) : kv_sequence;
  int stage = 0;
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    wait_for_copies();
    wgmma::fence_stores();
    block_barrier();  // this tile is here, and all have left the one that the next takes the place of
    const int next = stage + 1 < kStages ? stage + 1 : 0;
    if (first_key + kKeys < end) {
      tile.begin(key_lds + next * Keys::kBytes, key_rows.from(first_key + kKeys));
      tile.begin(value_lds + next * Keys::kBytes, value_rows.from(first_key + kKeys));
    }

    Accumulator scores[kKeyTiles];
    const uint32_t key_address = wgmma::address_of(key_lds + stage * Keys::kBytes);
    wgmma::fence();
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const int panel = h / kDepthsAPanel, column_bytes = h % kDepthsAPanel * kTile * sizeof(T);
      wgmma::multiply<T>(
          scores, wgmma::descriptor(query_address + panel * Queries::kPanelBytes + column_bytes, 16, wgmma::kAtomBytes),
          wgmma::descriptor(key_address + panel * Keys::kPanelBytes + column_bytes, 16, wgmma::kAtomBytes), h > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();

    if (edges.general()) {
      edges.apply(scores, wave_query, first_key);
    } else if (!edges.whole(first_query, first_key + kKeys - 1)) {
      edges.hide(scores, wave_query, first_key);
    }
    float largest[kRowsPerLane];
    row_maxima(scores, largest);
    softmax_step(scores, largest, edges.factor(), state[0], out);

    Operand<T> weights[kKeyTiles];
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) weights[k] = to_operand<T>(scores[k]);
    const uint32_t value_address = wgmma::address_of(value_lds + stage * Keys::kBytes);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      wgmma::multiply_add<T>(
          out, weights[k],
          wgmma::descriptor(value_address + k * kTile * wgmma::kRowBytes, Keys::kPanelBytes, wgmma::kAtomBytes));
    }
    wgmma::commit();
    if constexpr (kStages == 2) wgmma::wait<0>();
    stage = next;
  }
  wgmma::wait<0>();

  float inverse[kRowsPerLane];
#pragma unroll
  for (int slot = 0; slot < kRowsPerLane; ++slot) {
    const float total = reduce_row<Sum>(state[0].sum[slot]);
    inverse[slot] = total == 0.f ? 0.f : 1.f / total;
  }
  const int64_t stride = static_cast<int64_t>(heads) * head_size;
  T* to = output + (static_cast<int64_t>(batch) * sequence + wave_query) * stride + head * head_size;
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int i = 0; i < kAccumulatorSize; ++i) out[h].x[i] *= inverse[row_slot(i)];
    store_tile(to_pieces<T>(out[h]), to + h * kTile, stride, sequence - wave_query, head_size - h * kTile);
  }
#endif
}
#endif

// The same in float32 without matrix instructions, for any type, alignment and head size: 64 queries x 64 keys a block
// of 256 threads; a thread has 4 rows x 4 keys of the scores and 4 rows x 4 columns of each 64 columns of the output. A
// block computes 64 * kColumnTiles columns of the output, and all scores.
template <class T, int kColumnTiles>
__global__ __launch_bounds__(256, 1) void plain_attention_kernel(
    const T* query, const T* key, const T* value, const T* attention_bias, T* output, int heads, int sequence,
    int kv_sequence, int head_size, int64_t query_batch_stride, int64_t query_row_stride, int64_t query_head_stride,
    int64_t key_batch_stride, int64_t key_row_stride, int64_t key_head_stride, int64_t value_batch_stride,
    int64_t value_row_stride, int64_t value_head_stride, int64_t bias_batch_stride, int64_t bias_head_stride,
    float scale, int causal) {
  constexpr int kTile = 64, kDepth = 32, kThreads = 256;
  constexpr int kStride = kTile + 4;  // 16-byte rows; neighbouring rows start 4 banks apart
  // While scores are computed: kDepth rows of Q^T, then of K^T. Afterwards: 64 rows of V.
  alignas(16) __shared__ float stage[kTile][kStride];
  alignas(16) __shared__ float weights[kTile][kStride];  // (key, query)

  const int column_blocks = (head_size + kTile * kColumnTiles - 1) / (kTile * kColumnTiles);
  const int first_column = blockIdx.x % column_blocks * kTile * kColumnTiles;
  const int first_query = blockIdx.x / column_blocks * kTile;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int thread = threadIdx.x;
  const int row = thread / 16 * 4, column = thread % 16 * 4;  // of the thread's 4 x 4
  query += batch * query_batch_stride + head * query_head_stride;
  key += batch * key_batch_stride + head * key_head_stride;
  value += batch * value_batch_stride + head * value_head_stride;
  const ScoreEdges<T> edges = {attention_bias + batch * bias_batch_stride + head * bias_head_stride,
                               attention_bias != nullptr,
                               sequence,
                               kv_sequence,
                               scale,
                               causal};

  float out[kColumnTiles][4][4] = {};
  float largest[4], sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest[i] = -INFINITY;
    sum[i] = 0.f;
  }

  const int end = causal ? min(kv_sequence, first_query + kTile) : kv_sequence;
  for (int first_key = 0; first_key < end; first_key += kTile) {
    float scores[4][4] = {};
    for (int depth = 0; depth < head_size; depth += kDepth) {
      block_barrier();
#pragma unroll 2
      for (int i = thread; i < kTile * kDepth; i += kThreads) {
        const int d = i % kDepth, r = i / kDepth;
        const bool inside = depth + d < head_size;
        const bool has_query = inside && first_query + r < sequence, has_key = inside && first_key + r < kv_sequence;
        stage[d][r] = has_query ? to_float(query[(first_query + r) * query_row_stride + depth + d]) : 0.f;
        stage[kDepth + d][r] = has_key ? to_float(key[(first_key + r) * key_row_stride + depth + d]) : 0.f;
      }
      block_barrier();
#pragma unroll 8
      for (int d = 0; d < kDepth; ++d) {
        float q[4], k[4];
        memcpy(q, __builtin_assume_aligned(&stage[d][row], 16), sizeof(q));
        memcpy(k, __builtin_assume_aligned(&stage[kDepth + d][column], 16), sizeof(k));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) scores[i][j] = fmaf(q[i], k[j], scores[i][j]);
        }
      }
    }

    // Sixteen neighbouring lanes share four rows.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first_query + row + i;
      const T* bias_row = edges.bias_row(at);
      float updated = largest[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = edges.apply(scores[i][j], bias_row, at, first_key + column + j);
        updated = fmaxf(updated, scores[i][j]);
      }
      updated = wave_reduce<Max, 16>(updated);
      const float shift = updated == -INFINITY ? 0.f : updated;
      const float rescale = exp2f(largest[i] - shift);
      largest[i] = updated;
      sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = exp2f(scores[i][j] - shift);
        sum[i] += scores[i][j];
        weights[column + j][row + i] = scores[i][j];
      }
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[c][i][j] *= rescale;
      }
    }

#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      block_barrier();
#pragma unroll 2
      for (int i = thread; i < kTile * kTile; i += kThreads) {
        const int r = i / kTile, at = first_column + c * kTile + i % kTile;
        const bool valid = first_key + r < kv_sequence && at < head_size;
        stage[r][i % kTile] = valid ? to_float(value[(first_key + r) * value_row_stride + at]) : 0.f;
      }
      block_barrier();
#pragma unroll 8
      for (int k = 0; k < kTile; ++k) {
        float w[4], v[4];
        memcpy(w, __builtin_assume_aligned(&weights[k][row], 16), sizeof(w));
        memcpy(v, __builtin_assume_aligned(&stage[k][column], 16), sizeof(v));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) out[c][i][j] = fmaf(w[i], v[j], out[c][i][j]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float total = wave_reduce<Sum, 16>(sum[i]);
    const float inverse = total == 0.f ? 0.f : 1.f / total;
    const int at = first_query + row + i;
    T* to = output + (static_cast<int64_t>(batch) * sequence + at) * heads * head_size + head * head_size;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int to_column = first_column + c * kTile + column + j;
        if (at < sequence && to_column < head_size) to[to_column] = from_float<T>(out[c][i][j] * inverse);
      }
    }
  }
}

namespace {

// The largest heads that flash_attention_kernel is built for, and those with tiles of 80 keys.
#if SD_ORT_HIP
constexpr int64_t kLargestFlashHead = 128;
#else
constexpr int64_t kLargestFlashHead = 160;
#endif
constexpr int64_t kLargestShortHead = 80;
constexpr int64_t kLargestWarpgroupHead = 128;

// Launches any of the kernels above: they take the same arguments.
template <class T>
using AttentionKernel = void(const T*, const T*, const T*, const T*, T*, int, int, int, int, int64_t, int64_t, int64_t,
                             int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);

template <class T>
const char* launch_kernel(AttentionKernel<T>* kernel, const MultiHeadAttentionParams& p, int64_t blocks_a_head,
                          int threads, void* stream, size_t lds_bytes = 0) {
  return launch(kernel, dim3(blocks_a_head, p.heads, p.batch), dim3(threads), lds_bytes, stream,
                static_cast<const T*>(p.query.data), static_cast<const T*>(p.key.data),
                static_cast<const T*>(p.value.data), static_cast<const T*>(p.attention_bias), static_cast<T*>(p.output),
                p.heads, p.sequence, p.kv_sequence, p.head_size, p.query.batch_stride, p.query.row_stride,
                p.query.head_stride, p.key.batch_stride, p.key.row_stride, p.key.head_stride, p.value.batch_stride,
                p.value.row_stride, p.value.head_stride, p.bias_batch_stride, p.bias_head_stride, p.scale, p.causal);
}

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
const char* launch_flash(const MultiHeadAttentionParams& p, void* stream) {
  return launch_kernel<T>(flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>, p,
                          ceil_div(p.sequence, kQueries), kThreads, stream);
}

template <class T, int kHead, int kStage, int kThreads>
const char* launch_wide(const MultiHeadAttentionParams& p, void* stream) {
  return launch_kernel<T>(wide_attention_kernel<T, kHead, kStage, kThreads>, p, ceil_div(p.sequence, 64), kThreads,
                          stream);
}

#if !SD_ORT_HIP
template <class T, int kHead, int kGroups>
const char* launch_warpgroups(const MultiHeadAttentionParams& p, void* stream) {
  return launch_kernel<T>(warpgroup_attention_kernel<T, kHead, kGroups>, p,
                          ceil_div(p.sequence, wgmma::kRows * kGroups), wgmma::kThreads * kGroups, stream,
                          warpgroup_lds_bytes(kHead, kGroups));
}

template <class T, int kGroups>
const char* run_warpgroups(const MultiHeadAttentionParams& p, void* stream) {
  if (p.head_size <= 48) return launch_warpgroups<T, 48, kGroups>(p, stream);
  if (p.head_size <= 64) return launch_warpgroups<T, 64, kGroups>(p, stream);
  if (p.head_size <= 80) return launch_warpgroups<T, 80, kGroups>(p, stream);
  return launch_warpgroups<T, 128, kGroups>(p, stream);
}
#endif

// Whether warpgroup_attention_kernel was compiled for the current device.
bool has_warpgroups() {
#if SD_ORT_HIP
  return false;
#elif defined(SD_ORT_EMULATED) || defined(SD_ORT_SM_90A)
  return compute_capability() == 9;
#else
  return false;
#endif
}

template <class T, int kColumnTiles>
const char* launch_plain(const MultiHeadAttentionParams& p, void* stream) {
  return launch_kernel<T>(plain_attention_kernel<T, kColumnTiles>, p,
                          ceil_div(p.sequence, 64) * ceil_div(p.head_size, 64 * kColumnTiles), 256, stream);
}

template <class T>
const char* run_plain(const MultiHeadAttentionParams& p, void* stream) {
  if (p.head_size <= 64) return launch_plain<T, 1>(p, stream);
  if (p.head_size <= 192) return launch_plain<T, 3>(p, stream);
  return launch_plain<T, 4>(p, stream);
}

// The tiles of one head size. AMD's registers end sooner than NVIDIA's, and its waves of 64 take more queries.
template <class T, int kHead>
const char* run_flash(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel, void* stream) {
#if SD_ORT_HIP
  constexpr int kKeys = kHead > 96 ? 32 : 64;
  if (kernel == MultiHeadAttentionKernel::kLarge) return launch_flash<T, kHead, 128, kKeys, 256>(p, stream);
  if constexpr (kHead <= kLargestShortHead) {
    if (kernel == MultiHeadAttentionKernel::kShort) return launch_flash<T, kHead, 128, 80, 256>(p, stream);
  }
  return launch_flash<T, kHead, 64, kKeys / 2, 128>(p, stream);
#else
  if (kernel == MultiHeadAttentionKernel::kLarge) {
    if constexpr (kHead <= 64) return launch_flash<T, kHead, 128, 64, 128>(p, stream);
    return launch_flash<T, kHead, 128, 64, 256>(p, stream);
  }
  if constexpr (kHead <= kLargestShortHead) {
    constexpr int kQueries = kHead <= 48 ? 128 : 64;
    if (kernel == MultiHeadAttentionKernel::kShort) return launch_flash<T, kHead, kQueries, 80, 128>(p, stream);
  }
  return launch_flash<T, kHead, 64, 64, 128>(p, stream);
#endif
}

template <class T>
const char* run_matrix(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel, void* stream) {
#if !SD_ORT_HIP
  if (kernel == MultiHeadAttentionKernel::kWarpgroup) return run_warpgroups<T, 1>(p, stream);
  if (kernel == MultiHeadAttentionKernel::kTwoWarpgroups) return run_warpgroups<T, 2>(p, stream);
#endif
  if (p.head_size <= 32) return run_flash<T, 32>(p, kernel, stream);
  if (p.head_size <= 48) return run_flash<T, 48>(p, kernel, stream);
  if (p.head_size <= 64) return run_flash<T, 64>(p, kernel, stream);
  if (p.head_size <= 80) return run_flash<T, 80>(p, kernel, stream);
  if (p.head_size <= 96) return run_flash<T, 96>(p, kernel, stream);
  if (p.head_size <= 128) return run_flash<T, 128>(p, kernel, stream);
#if SD_ORT_HIP
  if (p.head_size <= 160) return launch_wide<T, 160, 32, 256>(p, stream);
#else
  if (p.head_size <= 160) return run_flash<T, 160>(p, kernel, stream);
#endif
#if SD_ORT_HIP
  constexpr int kThreads = 512;
#else
  constexpr int kThreads = 256;
#endif
  if (p.head_size <= 256) return launch_wide<T, 256, 64, kThreads>(p, stream);
  return launch_wide<T, 512, 64, kThreads>(p, stream);
}

// Whether rows can be read 16 bytes at a time and addressed by 32-bit offsets.
bool reads_wide(const HeadsView& view, int64_t rows) {
  return view.row_stride % 8 == 0 && view.head_stride % 8 == 0 && view.batch_stride % 8 == 0 &&
         are_aligned<16>(view.data) && rows * view.row_stride < int64_t{1} << 31;
}

}  // namespace

bool multi_head_attention_supports(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel) {
  if (kernel == MultiHeadAttentionKernel::kPlain) return true;
  if (kernel == MultiHeadAttentionKernel::kSmall && p.head_size > kLargestFlashHead) return false;
  const bool warpgroups =
      kernel == MultiHeadAttentionKernel::kWarpgroup || kernel == MultiHeadAttentionKernel::kTwoWarpgroups;
  if (warpgroups && (p.head_size > kLargestWarpgroupHead || !has_warpgroups())) return false;
  if (kernel == MultiHeadAttentionKernel::kShort && (p.head_size > kLargestShortHead || p.kv_sequence > 80))
    return false;
  return p.dtype != DType::kFloat32 && p.kv_sequence > 0 && p.head_size % 8 == 0 && p.head_size <= 512 &&
         are_aligned<16>(p.output) && reads_wide(p.query, p.sequence) && reads_wide(p.key, p.kv_sequence) &&
         reads_wide(p.value, p.kv_sequence);
}

const char* multi_head_attention_launch(const MultiHeadAttentionParams& p, MultiHeadAttentionKernel kernel,
                                        void* stream) {
  if (p.batch * p.heads * p.sequence * p.head_size == 0) return nullptr;
  if (kernel == MultiHeadAttentionKernel::kPlain) {
    return p.dtype == DType::kFloat32   ? run_plain<float>(p, stream)
           : p.dtype == DType::kFloat16 ? run_plain<half_t>(p, stream)
                                        : run_plain<bf16_t>(p, stream);
  }
  return p.dtype == DType::kFloat16 ? run_matrix<half_t>(p, kernel, stream) : run_matrix<bf16_t>(p, kernel, stream);
}

}  // namespace sd_ort
