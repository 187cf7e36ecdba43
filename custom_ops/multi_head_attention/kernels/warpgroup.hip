// MultiHeadAttention for fp16 and bf16 on NVIDIA's warpgroup instructions (sm_90a), head_size <= kHead.
//
// warpgroup_attention_kernel<T, kHead, kGroups>
//   Launch: block (128 * kGroups, 1, 1), grid (ceil(sequence / (64 * kGroups)), heads, batch), dynamic LDS
//   warpgroup_lds_bytes(kHead, kGroups).
// short_warpgroup_attention_kernel<T, kHead>: up to kShortKeys keys, neither masked nor causal, a positive scale. All
// is loaded at once, and what remains of a softmax in steps is left out: such calls are bound by their instructions.
//   Launch: block (128, 1, 1), grid (ceil(sequence / 64), heads, batch), dynamic LDS short_lds_bytes(kHead).
#include "common/wgmma.h"
#include "multi_head_attention/kernels/attention.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS

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
__global__ __launch_bounds__(wgmma::kThreads* kGroups,
                             kHead > 80     ? 2 / kGroups
                             : kGroups == 1 ? 3
                                            : 2) void warpgroup_attention_kernel(const T* query, const T* key,
                                                                                 const T* value,
                                                                                 const T* attention_bias, T* output,
                                                                                 AttentionShape shape) {
  wait_for_predecessor();
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

  const int first_query = blockIdx.x * kQueries;
  const int group = threadIdx.x / wgmma::kThreads;
  const int wave_query = first_query + threadIdx.x / kWave * kTile;
  const Head<T> head(query, key, value, attention_bias, shape);
  const ScoreEdges<T>& edges = head.edges;

  const Keys tile;  // of keys or of values
  Queries().begin(lds, head.query.from(first_query));
  tile.begin(key_lds, head.key);
  tile.begin(value_lds, head.value);

  SoftmaxState state[1];
  reset(state);
  Accumulator out[kHeadTiles];
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) zero(out[h]);

  const uint32_t query_address = wgmma::address_of(lds) + group * wgmma::kRows * wgmma::kRowBytes;
  const int end = keys_seen(shape, first_query, kQueries);
  int stage = 0;
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    wait_for_copies();
    wgmma::fence_stores();
    block_barrier();  // this tile is here, and all have left the one that the next takes the place of
    const int next = stage + 1 < kStages ? stage + 1 : 0;
    if (first_key + kKeys < end) {
      tile.begin(key_lds + next * Keys::kBytes, head.key.from(first_key + kKeys));
      tile.begin(value_lds + next * Keys::kBytes, head.value.from(first_key + kKeys));
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
  const int64_t stride = static_cast<int64_t>(shape.heads) * shape.head_size;
  T* to = output_row(output, shape, wave_query);
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int i = 0; i < kAccumulatorSize; ++i) out[h].x[i] *= inverse[row_slot(i)];
    store_tile(to_pieces<T>(out[h]), to + h * kTile, stride, shape.sequence - wave_query, shape.head_size - h * kTile);
  }
#endif
}

constexpr int kShortKeys = MultiHeadAttentionLimits::kShortKeys;
__host__ __device__ constexpr int short_lds_bytes(int head) {
  return warpgroup_panels(head) * wgmma::kRowBytes * (wgmma::kRows + 2 * kShortKeys);
}

template <class T, int kHead>
__global__ __launch_bounds__(wgmma::kThreads, kHead <= 64 ? 5 : 4) void short_warpgroup_attention_kernel(
    const T* query, const T* key, const T* value, const T*, T* output, AttentionShape shape) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  using namespace mma;
  constexpr int kHeadTiles = kHead / kTile, kKeyTiles = kShortKeys / kTile;
  constexpr int kDepthsAPanel = wgmma::kPanelColumns / kTile;
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

  const uint32_t query_address = wgmma::address_of(lds);
  const uint32_t key_address = query_address + Queries::kBytes, value_address = key_address + Keys::kBytes;
  Accumulator scores[kKeyTiles];
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
    // a row of nothing but -infinity is zeros
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
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < kKeyTiles; ++k) {
    wgmma::multiply_add<T>(
        out, weights[k],
        wgmma::descriptor(value_address + k * kTile * wgmma::kRowBytes, Keys::kPanelBytes, wgmma::kAtomBytes));
  }
  wgmma::commit();
#pragma unroll
  for (int slot = 0; slot < kRowsPerLane; ++slot) {
    const float total = reduce_row<Sum>(sum[slot]);
    sum[slot] = total == 0.f ? 0.f : reciprocal(total);
  }
  wgmma::wait<0>();

  // Not store_tile, which computes every address anew.
  const int column = accumulator_column(lane, 0);
#pragma unroll
  for (int slot = 0; slot < kRowsPerLane; ++slot) {
    const int row = first_query + threadIdx.x / kWave * kTile + slot_row(lane, slot);
    if (row >= shape.sequence) continue;
    T* const to = output_row(output, shape, row) + column;
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i) {
      const int element = 4 * (i % 2) + 2 * slot;
      const float pair[] = {out[i / 2].x[element] * sum[slot], out[i / 2].x[element + 1] * sum[slot]};
      if (i * 8 < shape.head_size) Vec<T, 2>::pack(pair).store(to + i * 8);
    }
  }
#endif
}

namespace {

template <class T, int kHead, int kGroups>
const char* launch_warpgroups(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(warpgroup_attention_kernel<T, kHead, kGroups>, p,
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
}  // namespace

// Whether the kernels were compiled for the current device.
bool attention_has_warpgroups() { return wgmma::are_compiled(); }

const char* attention_warpgroups(const MultiHeadAttentionParams& p, int groups, void* stream) {
  if (p.dtype == DType::kFloat16) {
    return groups == 1 ? run_warpgroups<half_t, 1>(p, stream) : run_warpgroups<half_t, 2>(p, stream);
  }
  return groups == 1 ? run_warpgroups<bf16_t, 1>(p, stream) : run_warpgroups<bf16_t, 2>(p, stream);
}

const char* attention_short_warpgroup(const MultiHeadAttentionParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run_short<half_t>(p, stream) : run_short<bf16_t>(p, stream);
}

#else

bool attention_has_warpgroups() { return false; }
const char* attention_warpgroups(const MultiHeadAttentionParams&, int, void*) { return "no warpgroups here"; }
const char* attention_short_warpgroup(const MultiHeadAttentionParams&, void*) { return "no warpgroups here"; }

#endif
}  // namespace sd_ort
