// MultiHeadAttention for fp16 and bf16 on NVIDIA's warpgroup instructions (sm_90a), head_size <= kHead.
//
// warpgroup_attention_kernel<T, kHead, kGroups>
//   Launch: block (128 * kGroups, 1, 1), grid (ceil(sequence / (64 * kGroups)), heads, batch), dynamic LDS
//   warpgroup_lds_bytes(kHead, kGroups).
#include "operators/multi_head_attention/kernels/warpgroup.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS

// Tiles in LDS: one in use, one being loaded and, if it fits, one whose values are still being multiplied.
__host__ __device__ constexpr int warpgroup_stages(int head) { return head <= 64 ? 3 : 2; }
__host__ __device__ constexpr int warpgroup_lds_bytes(int head, int groups) {
  return warpgroup_panels(head) * wgmma::kRowBytes * (64 * groups + 2 * warpgroup_stages(head) * kWarpgroupKeys);
}

// A warpgroup computes 64 queries; the warpgroups of a block share tiles of keys and values.
template <class T, int kHead, int kGroups>
__global__ __launch_bounds__(wgmma::kThreads* kGroups,
                             kHead > 80 ? 2 / kGroups
                             : kGroups == 1
                                 ? 3
                                 : 2) void warpgroup_attention_kernel(const T* query, const T* key, const T* value,
                                                                      const T* attention_bias,
                                                                      QuantizedOutput<T> output, AttentionShape shape) {
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

  const Keys tile;  // of keys or values
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
    block_barrier();  // this tile is loaded, and no thread reads the tile that the next one replaces
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
    } else if (!edges.all_visible(first_query, first_key + kKeys - 1)) {
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
  const int64_t to = output_row(shape, wave_query);
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int i = 0; i < kAccumulatorSize; ++i) out[h].x[i] *= inverse[row_slot(i)];
    store_tile(to_pieces<T>(out[h]), output, to + h * kTile, stride, shape.sequence - wave_query,
               shape.head_size - h * kTile);
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
}  // namespace

// Whether the kernels were compiled for the current device.
bool attention_has_warpgroups() { return wgmma::are_compiled(); }

const char* attention_warpgroups(const MultiHeadAttentionParams& p, int groups, void* stream) {
  if (p.dtype == DType::kFloat16) {
    return groups == 1 ? run_warpgroups<half_t, 1>(p, stream) : run_warpgroups<half_t, 2>(p, stream);
  }
  return groups == 1 ? run_warpgroups<bf16_t, 1>(p, stream) : run_warpgroups<bf16_t, 2>(p, stream);
}

#else

bool attention_has_warpgroups() { return false; }
const char* attention_warpgroups(const MultiHeadAttentionParams&, int, void*) { return "no warpgroups here"; }

#endif
}  // namespace sd_ort
