// MultiHeadAttention on a GPU: flash attention (Dao et al., "FlashAttention-2", 2023). A block takes some queries of one
// head and walks over the keys in tiles; softmax runs online, in powers of two; the S x L scores never exist.
//
// flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>: fp16 and bf16, matrix instructions, head_size <= kHead.
//   Launch: block (kThreads, 1, 1), grid (ceil(sequence / kQueries), heads, batch), no dynamic LDS.
#include "common/gpu.h"
#include "common/mma.h"
#include "common/reduce.h"
#include "multi_head_attention/op.h"

namespace sd_ort {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargestFloat = 3.4028234663852886e38f;

__device__ inline float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#elif defined(__HIP_DEVICE_COMPILE__)
  return __builtin_amdgcn_exp2f(x);
#else
  return exp2f(x);
#endif
}

// Rows of one head of query, key or value in global memory; rows aligned to 16 bytes, columns a multiple of 8, under
// 4 GB from first to last: an address is a wave's pointer and a lane's 32-bit offset.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int rows;
  int columns;

  __device__ Rows from(int row) const { return {data + row * stride, stride, rows - row, columns}; }
  __device__ bool holds(int row, int column) const { return row < rows && column < columns; }
  __device__ const T* at(int row, int column) const {
    const uint32_t offset = (static_cast<uint32_t>(row) * static_cast<uint32_t>(stride) + column) * sizeof(T);
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(data) + offset);
  }

  // N neighbouring elements of a row, zeros outside the tensor. No branch, so that many loads can be under way.
  template <int N>
  __device__ Vec<T, N> load(int row, int column) const {
    const bool valid = holds(row, column);
    uint32_t bits[N / 2];
    const auto loaded = Vec<T, N>::load(at(valid ? row : 0, valid ? column : 0));
    memcpy(bits, &loaded.raw, sizeof(bits));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) bits[i] = valid ? bits[i] : 0u;
    Vec<T, N> vec;
    memcpy(&vec.raw, bits, sizeof(bits));
    return vec;
  }
};

// Copies a tile of kRows x kColumns to LDS, row by row: begin() starts the loads, finish() has them written. On NVIDIA
// the copy engine writes LDS in between, so begin() may run only when the tile is free.
template <class T, int kRows, int kColumns, int kThreads>
class RowTile {
 public:
  static constexpr int kStride = kColumns + mma::kPadding;
  static constexpr int kSize = kRows * kStride;

  __device__ explicit RowTile(T* lds) : lds_(lds) {}

  __device__ void begin(const Rows<T>& from) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int piece = threadIdx.x + i * kThreads;
      if (kPieces % kThreads != 0 && piece >= kPieces) break;
      const int row = piece / kPiecesARow, column = piece % kPiecesARow * 8;
#if defined(SD_ORT_MMA_NVIDIA)
      T* to = lds_ + row * kStride + column;
      const bool valid = from.holds(row, column);
      mma::copy_16_bytes_async(to, valid ? from.at(row, column) : from.data, valid);
#else
      pieces_[i] = from.template load<8>(row, column);
#endif
    }
  }

  __device__ void finish() {
#if defined(SD_ORT_MMA_NVIDIA)
    mma::wait_for_copies();
#else
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int piece = threadIdx.x + i * kThreads;
      if (kPieces % kThreads != 0 && piece >= kPieces) break;
      T* to = lds_ + piece / kPiecesARow * kStride + piece % kPiecesARow * 8;
      memcpy(__builtin_assume_aligned(to, mma::kPadding * sizeof(T)), &pieces_[i].raw, 16);
    }
#endif
  }

  // The 16 x 16 operand at (row, column).
  __device__ mma::Operand<T> operand(int row, int column) const {
    return mma::load_operand(lds_ + row * kStride + column, kStride);
  }

 protected:
  static constexpr int kPiecesARow = kColumns / 8;
  static constexpr int kPieces = kRows * kPiecesARow;
  static constexpr int kSteps = (kPieces + kThreads - 1) / kThreads;

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

  __device__ void begin(const Rows<T>& from) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int patch = threadIdx.x + i * kThreads;
      if (kPatches % kThreads != 0 && patch >= kPatches) break;
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        patches_[i][row] = from.template load<8>(patch_row(patch) + row, patch_column(patch));
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int patch = threadIdx.x + i * kThreads;
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

// Per query: the largest score so far, in powers of two, and the sum of 2^(score - largest) over the lane's keys.
struct SoftmaxState {
  float largest[mma::kRowsPerLane];
  float sum[mma::kRowsPerLane];
};

// scores * factor are logarithms to base 2. Replaces them by 2^(score - largest) with the new largest score of each
// row, updates the state and scales `output`, which was computed with the old one. A row of nothing but -infinity stays
// zero.
template <int kKeyTiles, int kHeadTiles>
__device__ inline void softmax_step(mma::Accumulator (&scores)[kKeyTiles], float factor, SoftmaxState& state,
                                    mma::Accumulator (&output)[kHeadTiles]) {
  float largest[mma::kRowsPerLane], shift[mma::kRowsPerLane], rescale[mma::kRowsPerLane];
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) largest[slot] = -INFINITY;
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < mma::kAccumulatorSize; ++i) {
      largest[mma::row_slot(i)] = fmaxf(largest[mma::row_slot(i)], scores[tile].x[i]);
    }
  }
  bool moved = false;
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
    largest[slot] = fmaxf(state.largest[slot], mma::reduce_row<Max>(largest[slot]) * factor);
    shift[slot] = largest[slot] == -INFINITY ? 0.f : largest[slot];
    rescale[slot] = exp2_fast(state.largest[slot] - shift[slot]);
    moved |= rescale[slot] != 1.f;
    state.largest[slot] = largest[slot];
    state.sum[slot] *= rescale[slot];
  }
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < mma::kAccumulatorSize; ++i) {
      const int slot = mma::row_slot(i);
      scores[tile].x[i] = exp2_fast(fmaf(scores[tile].x[i], factor, -shift[slot]));
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
  const T* bias;  // of this batch and head, or null
  int queries;
  int keys;
  float scale;
  int causal;

  // Whether every query of [first_query, ..) sees keys up to `last_key` and scores need only be scaled.
  __device__ bool plain(int first_query, int last_key) const {
    return bias == nullptr && scale > 0.f && last_key < keys && (!causal || last_key <= first_query);
  }

  // A raw score as a logarithm to base 2, -infinity when the key is hidden from the query. A large negative finite
  // bias stays finite: a row where all keys have it is their mean, as in plain arithmetic.
  __device__ float apply(float score, int query, int key) const {
    if (key >= keys || (causal && key > query)) return -INFINITY;
    float x = score * scale;
    if (bias != nullptr && query < queries) x += to_float(bias[static_cast<uint32_t>(query * keys + key)]);
    return x == -INFINITY ? x : fmaxf(x * kLog2E, -kLargestFloat);
  }
};

}  // namespace

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
__global__ __launch_bounds__(kThreads) void flash_attention_kernel(
    const T* query, const T* key, const T* value, const T* attention_bias, T* output, int sequence, int kv_sequence,
    int head_size, int64_t query_batch_stride, int64_t query_row_stride, int64_t query_head_stride,
    int64_t key_batch_stride, int64_t key_row_stride, int64_t key_head_stride, int64_t value_batch_stride,
    int64_t value_row_stride, int64_t value_head_stride, int64_t bias_batch_stride, int64_t bias_head_stride,
    float scale, int causal) {
  using namespace mma;
  constexpr int kWaves = kThreads / SD_ORT_WAVE_SIZE;
  constexpr int kRowTiles = kQueries / kTile / kWaves;
  constexpr int kHeadTiles = kHead / kTile;
  constexpr int kKeyTiles = kKeys / kTile;
  static_assert(kRowTiles * kTile * kWaves == kQueries, "each wave takes whole tiles of queries");

  using Keys = RowTile<T, kKeys, kHead, kThreads>;
  using Values = ColumnTile<T, kKeys, kHead, kThreads>;
  alignas(16) __shared__ T key_lds[Keys::kSize];
  alignas(16) __shared__ T value_lds[Values::kSize];
  Keys keys(key_lds);
  Values values(value_lds);

  const int head = blockIdx.y, batch = blockIdx.z, heads = gridDim.y;
  const int lane = lane_id();
  const int first_query = blockIdx.x * kQueries;
  const int wave_query = first_query + threadIdx.x / SD_ORT_WAVE_SIZE * kRowTiles * kTile;
  const Rows<T> query_rows = {query + batch * query_batch_stride + head * query_head_stride, query_row_stride, sequence,
                               head_size};
  const Rows<T> key_rows = {key + batch * key_batch_stride + head * key_head_stride, key_row_stride, kv_sequence,
                             head_size};
  const Rows<T> value_rows = {value + batch * value_batch_stride + head * value_head_stride, value_row_stride, kv_sequence,
                               head_size};
  const ScoreEdges<T> edges = {
      attention_bias == nullptr ? nullptr : attention_bias + batch * bias_batch_stride + head * bias_head_stride,
      sequence, kv_sequence, scale, causal};

  keys.begin(key_rows);
  HeldOperand<T, (kHead > 80)> queries[kRowTiles][kHeadTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const auto piece = query_rows.template load<kChunk>(wave_query + m * kTile + chunk_row(lane),
                                                          h * kTile + chunk_column(lane));
      Chunk chunk;
      memcpy(chunk.r, &piece.raw, sizeof(chunk.r));
      queries[m][h].hold(chunk);
    }
  }

  SoftmaxState state[kRowTiles];
  Accumulator out[kRowTiles][kHeadTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int slot = 0; slot < kRowsPerLane; ++slot) {
      state[m].largest[slot] = -INFINITY;
      state[m].sum[slot] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) zero(out[m][h]);
  }

  const int end = causal ? min(kv_sequence, first_query + kQueries) : kv_sequence;
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    keys.finish();
    __syncthreads();
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
      }
      schedule_barrier();
    }

    const bool plain = edges.plain(first_query, first_key + kKeys - 1);
    if (!plain) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int i = 0; i < kAccumulatorSize; ++i) {
            scores[m][k].x[i] = edges.apply(scores[m][k].x[i], wave_query + m * kTile + accumulator_row(lane, i),
                                            first_key + k * kTile + accumulator_column(lane, i));
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) softmax_step(scores[m], plain ? scale * kLog2E : 1.f, state[m], out[m]);

    values.finish();
    __syncthreads();
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
    const int row = wave_query + m * kTile + chunk_row(lane);
    T* to = output + (static_cast<int64_t>(batch) * sequence + row) * heads * head_size + head * head_size;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < kAccumulatorSize; ++i) out[m][h].x[i] *= inverse[row_slot(i)];
      const Chunk chunk = to_chunk<T>(out[m][h]);
      const int column = h * kTile + chunk_column(lane);
      if (row >= sequence || column >= head_size) continue;
      Vec<T, kChunk> piece;
      memcpy(&piece.raw, chunk.r, sizeof(chunk.r));
      piece.store(to + column);
    }
  }
}

namespace {

template <class T, int kHead, int kQueries, int kKeys, int kThreads>
const char* launch_flash(const MultiHeadAttentionParams& p, void* stream) {
  return launch(flash_attention_kernel<T, kHead, kQueries, kKeys, kThreads>,
                dim3(ceil_div(p.sequence, kQueries), p.heads, p.batch), dim3(kThreads), 0, stream,
                static_cast<const T*>(p.query.data), static_cast<const T*>(p.key.data),
                static_cast<const T*>(p.value.data), static_cast<const T*>(p.attention_bias), static_cast<T*>(p.output),
                p.sequence, p.kv_sequence, p.head_size, p.query.batch_stride, p.query.row_stride, p.query.head_stride,
                p.key.batch_stride, p.key.row_stride, p.key.head_stride, p.value.batch_stride, p.value.row_stride,
                p.value.head_stride, p.bias_batch_stride, p.bias_head_stride, p.scale, p.causal);
}

template <class T>
const char* launch_type(const MultiHeadAttentionParams& p, const MultiHeadAttentionConfig&, void* stream) {
  return launch_flash<T, 48, 64, 64, 128>(p, stream);
}

}  // namespace

const char* multi_head_attention_launch(const MultiHeadAttentionParams& p, const MultiHeadAttentionConfig& config,
                                        void* stream) {
  return p.dtype == DType::kFloat16 ? launch_type<half_t>(p, config, stream) : launch_type<bf16_t>(p, config, stream);
}

}  // namespace sd_ort
