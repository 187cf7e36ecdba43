// MultiHeadAttention for fp16 and bf16 on NVIDIA's warpgroup instructions (sm_90a), without mask, not causal, with a
// positive scale. The simpler kernel permits five blocks per multiprocessor, 640 on an H200: as many as SDXL's 1024
// queries of 20 heads and 2 images have.
//
// short_warpgroup_attention_kernel<T, kHead>: up to kShortKeys keys. All keys are loaded at once, without an online
// softmax: such calls are bound by instructions.
//   Launch: block (128, 1, 1), grid (ceil(sequence / 64), heads, batch), dynamic LDS short_lds_bytes(kHead).
// full_tiles_attention_kernel<T>: heads of 64, keys a multiple of 64.
//   Launch: block (128, 1, 1), grid (ceil(sequence / 64), heads, batch), dynamic LDS kFullTilesLdsBytes.
#include "operators/multi_head_attention/kernels/warpgroup.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS

constexpr int kShortKeys = MultiHeadAttentionLimits::kShortKeys;
__host__ __device__ constexpr int short_lds_bytes(int head) {
  return warpgroup_panels(head) * wgmma::kRowBytes * (wgmma::kRows + 2 * kShortKeys);
}

namespace {

// Computes raw scores of 64 queries (panels of kHead columns in LDS) and kTiles * 16 keys.
template <class T, int kHead, int kTiles>
__device__ inline void score(mma::Accumulator (&scores)[kTiles], uint32_t queries, uint32_t keys) {
  constexpr int kDepthsAPanel = wgmma::kPanelColumns / mma::kTile;
  constexpr uint32_t kQueryPanel = wgmma::kRows * wgmma::kRowBytes, kKeyPanel = kTiles * mma::kTile * wgmma::kRowBytes;
  wgmma::fence();
#pragma unroll
  for (int h = 0; h < kHead / mma::kTile; ++h) {
    const int panel = h / kDepthsAPanel, column_bytes = h % kDepthsAPanel * mma::kTile * sizeof(T);
    wgmma::multiply<T>(scores, wgmma::descriptor(queries + panel * kQueryPanel + column_bytes, 16, wgmma::kAtomBytes),
                       wgmma::descriptor(keys + panel * kKeyPanel + column_bytes, 16, wgmma::kAtomBytes), h > 0);
  }
  wgmma::commit();
  wgmma::wait<0>();
}

// Starts to add the weighted values (panels of kKeyTiles * 16 rows in LDS).
template <class T, int kHeadTiles, int kKeyTiles>
__device__ inline void begin_weighting(mma::Accumulator (&out)[kHeadTiles], const mma::Operand<T> (&weights)[kKeyTiles],
                                       uint32_t values) {
  constexpr uint32_t kPanel = kKeyTiles * mma::kTile * wgmma::kRowBytes;
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < kKeyTiles; ++k) {
    wgmma::multiply_add<T>(out, weights[k],
                           wgmma::descriptor(values + k * mma::kTile * wgmma::kRowBytes, kPanel, wgmma::kAtomBytes));
  }
  wgmma::commit();
}

// Waits for the sums of weighted values and writes them, divided by the sums of the weights. Not by store_tile, which
// recomputes every address.
template <class T, int kHeadTiles>
__device__ inline void finish_rows(const mma::Accumulator (&out)[kHeadTiles], const float (&weights)[mma::kRowsPerLane],
                                   const QuantizedOutput<T>& output, const AttentionShape& shape) {
  const int lane = mma::lane_id(), column = mma::accumulator_column(lane, 0);
  float factors[mma::kRowsPerLane];
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
    const float total = mma::reduce_row<Sum>(weights[slot]);
    factors[slot] = total == 0.f ? 0.f : reciprocal(total);
  }
  wgmma::wait<0>();
#pragma unroll
  for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
    const int row = blockIdx.x * wgmma::kRows + threadIdx.x / mma::kWave * mma::kTile + mma::slot_row(lane, slot);
    if (row >= shape.sequence) continue;
    const int64_t to = output_row(shape, row) + column;
#pragma unroll
    for (int i = 0; i < 2 * kHeadTiles; ++i) {
      const int element = 4 * (i % 2) + 2 * slot;
      const float pair[] = {out[i / 2].x[element] * factors[slot], out[i / 2].x[element + 1] * factors[slot]};
      if (i * 8 < shape.head_size) output.store(to + i * 8, pair);
    }
  }
}

}  // namespace

template <class T, int kHead>
__global__ __launch_bounds__(wgmma::kThreads, kHead <= 64 ? 5 : 4) void short_warpgroup_attention_kernel(
    const T* query, const T* key, const T* value, const T*, QuantizedOutput<T> output, AttentionShape shape) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  using namespace mma;
  constexpr int kHeadTiles = kHead / kTile, kKeyTiles = kShortKeys / kTile;
  using Queries = PanelTile<T, wgmma::kRows, kHead, wgmma::kThreads>;
  using Keys = PanelTile<T, kShortKeys, kHead, wgmma::kThreads>;
  static_assert(Queries::kBytes + 2 * Keys::kBytes == short_lds_bytes(kHead));
  SD_ORT_DYNAMIC_LDS(char, lds);
  const int first_query = blockIdx.x * wgmma::kRows;
  const Head<T> head(query, key, value, nullptr, shape);
  const Keys tile;  // of keys or of values
  Queries().begin(lds, head.query.from(first_query));
  tile.begin(lds + Queries::kBytes, head.key);
  tile.begin(lds + Queries::kBytes + Keys::kBytes, head.value);
  wait_for_copies();
  wgmma::fence_stores();
  block_barrier();

  const uint32_t query_address = wgmma::address_of(lds), key_address = query_address + Queries::kBytes;
  Accumulator scores[kKeyTiles];
  score<T, kHead>(scores, query_address, key_address);

  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < kKeyTiles; ++k) {
    if (shape.kv_sequence >= (k + 1) * kTile) continue;
#pragma unroll
    for (int i = 0; i < kAccumulatorSize; ++i) {
      if (k * kTile + accumulator_column(lane, i) >= shape.kv_sequence) scores[k].x[i] = -INFINITY;
    }
  }
  float largest[kRowsPerLane], sum[kRowsPerLane];
  row_maxima(scores, largest);
  const float factor = shape.scale * kLog2E;
#pragma unroll
  for (int slot = 0; slot < kRowsPerLane; ++slot) {
    sum[slot] = 0.f;
    // a row of only -infinity gives zeros
    largest[slot] = largest[slot] == -INFINITY ? 0.f : largest[slot] * factor;
  }
  Operand<T> weights[kKeyTiles];
#pragma unroll
  for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
    for (int i = 0; i < kAccumulatorSize; ++i) {
      scores[k].x[i] = power_of_two(fmaf(scores[k].x[i], factor, -largest[row_slot(i)]));
      sum[row_slot(i)] += scores[k].x[i];
    }
    weights[k] = to_operand<T>(scores[k]);
  }

  Accumulator out[kHeadTiles];
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) zero(out[h]);
  begin_weighting(out, weights, key_address + Keys::kBytes);
  finish_rows(out, sum, output, shape);
#endif
}

constexpr int kWholeHead = MultiHeadAttentionLimits::kFullTilesHead;
constexpr int kTileBytes = kWarpgroupKeys * wgmma::kRowBytes;
constexpr int kFullTilesLdsBytes = 5 * kTileBytes;  // queries, and two stages of keys and values

template <class T>
__global__ __launch_bounds__(wgmma::kThreads,
                             5) void full_tiles_attention_kernel(const T* query, const T* key, const T* value, const T*,
                                                                 QuantizedOutput<T> output, AttentionShape shape) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  using namespace mma;
  static_assert(kWholeHead == wgmma::kPanelColumns, "a row is a panel's");
  constexpr int kTiles = kWholeHead / kTile, kPieces = kWholeHead / 8, kRowsAStep = wgmma::kThreads / kPieces;
  SD_ORT_DYNAMIC_LDS(char, lds);
  const Head<T> head(query, key, value, nullptr, shape);
  PanelTile<T, wgmma::kRows, kWholeHead, wgmma::kThreads>().begin(lds, head.query.from(blockIdx.x * wgmma::kRows));

  // A thread copies the same 16 bytes of every 16th row.
  const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const T* keys = head.key.at(head.key.offset(row, piece * 8));
  const T* values = head.value.at(head.value.offset(row, piece * 8));
  char* const to = lds + kTileBytes + wgmma::piece_offset(row, piece);
  const auto begin_tile = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kWarpgroupKeys / kRowsAStep; ++i) {
      char* const here = to + 2 * stage * kTileBytes + i * kRowsAStep * wgmma::kRowBytes;
      copy_16_bytes_async(here, keys, true, true);
      copy_16_bytes_async(here + kTileBytes, values, true, true);
      keys += kRowsAStep * shape.key_row_stride;
      values += kRowsAStep * shape.value_row_stride;
    }
  };
  begin_tile(0);

  SoftmaxState state[1];
  reset(state);
  Accumulator out[kTiles];
#pragma unroll
  for (int h = 0; h < kTiles; ++h) zero(out[h]);
  const float factor = shape.scale * kLog2E;
  const uint32_t query_address = wgmma::address_of(lds);
  int stage = 0;
  for (int first_key = 0; first_key < shape.kv_sequence; first_key += kWarpgroupKeys, stage ^= 1) {
    wait_for_copies();
    wgmma::fence_stores();
    wgmma::wait<0>();
    block_barrier();  // this tile is loaded, and no thread reads the tile that the next one replaces
    if (first_key + kWarpgroupKeys < shape.kv_sequence) begin_tile(stage ^ 1);

    Accumulator scores[kTiles];
    const uint32_t key_address = query_address + (1 + 2 * stage) * kTileBytes;
    score<T, kWholeHead>(scores, query_address, key_address);
    float largest[kRowsPerLane];
    row_maxima(scores, largest);
    softmax_step(scores, largest, factor, state[0], out);
    Operand<T> weights[kTiles];
#pragma unroll
    for (int k = 0; k < kTiles; ++k) weights[k] = to_operand<T>(scores[k]);
    begin_weighting(out, weights, key_address + kTileBytes);
  }
  finish_rows(out, state[0].sum, output, shape);
#endif
}

namespace {

template <class T, int kHead>
const char* launch_short(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(short_warpgroup_attention_kernel<T, kHead>, p, ceil_div(p.sequence, wgmma::kRows),
                             wgmma::kThreads, stream, short_lds_bytes(kHead));
}

template <class T>
const char* run_short(const MultiHeadAttentionParams& p, void* stream) {
  if (p.head_size <= 48) return launch_short<T, 48>(p, stream);
  if (p.head_size <= 64) return launch_short<T, 64>(p, stream);
  return launch_short<T, 80>(p, stream);
}

template <class T>
const char* launch_whole_tiles(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(full_tiles_attention_kernel<T>, p, ceil_div(p.sequence, wgmma::kRows), wgmma::kThreads,
                             stream, kFullTilesLdsBytes);
}
}  // namespace

const char* attention_short_warpgroup(const MultiHeadAttentionParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run_short<half_t>(p, stream) : run_short<bf16_t>(p, stream);
}

const char* attention_full_tiles(const MultiHeadAttentionParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? launch_whole_tiles<half_t>(p, stream) : launch_whole_tiles<bf16_t>(p, stream);
}

#else

const char* attention_short_warpgroup(const MultiHeadAttentionParams&, void*) { return "no warpgroups here"; }
const char* attention_full_tiles(const MultiHeadAttentionParams&, void*) { return "no warpgroups here"; }

#endif
}  // namespace sd_ort
