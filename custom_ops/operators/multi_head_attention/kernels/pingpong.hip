// MultiHeadAttention for fp16 and bf16 on NVIDIA's warpgroup instructions (sm_90a), without mask, not causal, with a
// positive scale, for heads up to 40 and many keys. One warpgroup of a block copies keys and values; each other one
// computes 64 queries, and they take turns to multiply: while one multiplies, others compute their softmax (Shah et
// al., "FlashAttention-3", 2024). Rows of 40 values leave room in a tile of 48 for a column of ones, whose sum is that
// of the weights.
//
// pingpong_attention_kernel<T>
//   Launch: block (pingpong::kThreads, 1, 1), grid (ceil(sequence / pingpong::kQueries), heads, batch), dynamic LDS
//   pingpong::kLdsBytes.
#include "common/bulk_copy.h"
#include "common/cluster.h"
#include "operators/multi_head_attention/kernels/warpgroup.h"

namespace sd_ort {
#if SD_ORT_HAS_WARPGROUPS
namespace pingpong {

constexpr int kWaves = wgmma::kThreads / mma::kWave;  // of a warpgroup
constexpr int kGroups = 3, kThreads = wgmma::kThreads * (1 + kGroups), kQueries = wgmma::kRows * kGroups;
constexpr int kCopyRegisters = 32, kGroupRegisters = 160;
constexpr int kHead = 48, kHeadTiles = kHead / mma::kTile, kPieces = kHead / 8;
constexpr int kOnesColumn = MultiHeadAttentionLimits::kPingpongHead, kOnesPiece = kOnesColumn / 8;
static_assert(kOnesPiece == kPieces - 1);
constexpr int kKeys = 128, kKeyTiles = kKeys / mma::kTile, kStages = 3;  // of a tile of keys or values; their number
constexpr int kTileBytes = kKeys * wgmma::kRowBytes;
constexpr int kKeysAt = kQueries * wgmma::kRowBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
constexpr int kBarriersAt = kValuesAt + kStages * kTileBytes;
constexpr int kLdsBytes = kBarriersAt + (4 * kStages + kGroups) * 8;

enum Tensor { kKey, kValue };

// Addresses in shared memory.
struct Lds {
  uint32_t start;
  __device__ uint32_t queries(int group) const { return start + group * wgmma::kRows * wgmma::kRowBytes; }
  __device__ uint32_t tile(Tensor tensor, int stage) const {
    return start + (tensor == kKey ? kKeysAt : kValuesAt) + stage * kTileBytes;
  }
  __device__ uint32_t barrier(int index) const { return start + kBarriersAt + index * 8; }
  __device__ uint32_t filled(Tensor tensor, int stage) const { return barrier(tensor * kStages + stage); }
  __device__ uint32_t emptied(Tensor tensor, int stage) const { return barrier((2 + tensor) * kStages + stage); }
  __device__ uint32_t turn(int group) const { return barrier(4 * kStages + group); }

  __device__ void init_barriers() const {
    for (Tensor tensor : {kKey, kValue}) {
      for (int stage = 0; stage < kStages; ++stage) {
        bulk::init_barrier(filled(tensor, stage), kWaves);
        bulk::init_barrier(emptied(tensor, stage), kGroups * kWaves);
      }
    }
    for (int group = 0; group < kGroups; ++group) bulk::init_barrier(turn(group), kWaves);
    bulk::publish_barriers();
  }
};

// A thread's copies of kRows rows of a head: the same piece of 8 columns of every 16th row.
template <class T, int kRows>
class RowCopies {
  static constexpr int kRowPieces = wgmma::kRowBytes / 16, kStep = wgmma::kThreads / kRowPieces;

 public:
  // Of `pieces` pieces a row. Rows and columns outside of `from` become zeros.
  __device__ void begin(char* lds, const Rows<T>& from, int first_row, int pieces) const {
    if (piece_ >= pieces) return;
    const int column = piece_ * 8, row = first_row + row_;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      const bool valid = from.holds(row + i, column);
      const T* const source = valid ? from.data + static_cast<int64_t>(row + i) * from.stride + column : from.data;
      mma::copy_16_bytes_async(lds + to_ + i * wgmma::kRowBytes, source, valid, true);
    }
  }

 private:
  const int thread_ = static_cast<int>(threadIdx.x) % wgmma::kThreads;
  const int row_ = thread_ / kRowPieces, piece_ = thread_ % kRowPieces;
  const uint32_t to_ = wgmma::piece_offset(row_, piece_);
};

// Copies the keys and values of all tiles in turn, by a warpgroup.
template <class T>
__device__ void load_tiles(const Lds& lds, char* memory, const Head<T>& head, int tiles) {
  constexpr int kAhead = 2;  // copies that are not waited for yet
  const RowCopies<T, kKeys> copies;
  bulk::Ring<kStages> ring, filled;
  for (int copy = 0; copy < 2 * tiles + kAhead; ++copy) {
    const Tensor tensor = copy % 2 == 0 ? kKey : kValue;
    if (copy < 2 * tiles) {
      const int first_key = copy / 2 * kKeys;
      char* const tile = memory + (lds.tile(tensor, ring.stage) - lds.start);
      bulk::wait(lds.emptied(tensor, ring.stage), ring.parity ^ 1);
      if (tensor == kKey) {
        copies.begin(tile, head.key, first_key, kPieces);
      } else {
        copies.begin(tile, head.value, first_key, kOnesPiece);
        ring.next();
      }
    }
    commit_copies();
    if (copy < kAhead) continue;
    static_assert(kAhead % 2 == 0, "the copy that has arrived is of the same tensor");
    wait_for_copies<kAhead>();
    wgmma::fence_stores();
    wave_barrier();  // the copies of all its threads
    bulk::arrive_wave(lds.filled(tensor, filled.stage));
    if (tensor == kValue) filled.next();
  }
}

// Work of a warpgroup that computes 64 queries.
template <class T>
class Group {
  using Weights = mma::Operand<T>[kKeyTiles];

 public:
  __device__ Group(const Lds& lds, int group, const ScoreEdges<T>& edges) : lds_(lds), group_(group), edges_(edges) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) mma::zero(out_[h]);
  }

  __device__ void run() {
    const int tiles = (edges_.keys + kKeys - 1) / kKeys;
    Weights weights;
    wait_for_turn();
    begin_scores();
    pass_turn();
    wgmma::wait<0>();
    finish_scores(0);
    softmax<true>();
    round(weights);
    for (int tile = 1; tile < tiles; ++tile) {
      wait_for_turn();
      begin_scores();
      begin_sums(weights);
      pass_turn();
      wgmma::wait<1>();
      finish_scores(tile * kKeys);
      const bool moved = softmax<false>();
      wgmma::settle(scores_);  // before the wait: the sums need not be finished for this
      wgmma::wait<0>();
      finish_sums();
      if (moved) rescale();
      round(weights);
    }
    wait_for_turn();
    begin_sums(weights);
    pass_turn();
    wgmma::wait<0>();
    finish_sums();
  }

  // Writes the sums of weighted values, divided by the sums of the weights.
  __device__ void write(const QuantizedOutput<T>& output, const AttentionShape& shape) const {
    static_assert(kOnesColumn % mma::kTile == 8);
    const int lane = mma::lane_id(), column = mma::accumulator_column(lane, 0);
    const int wave = static_cast<int>(threadIdx.x) / mma::kWave % kWaves;
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      const float total = shuffle(out_[kOnesColumn / mma::kTile].x[4 + 2 * slot], lane & ~3);
      const float factor = total == 0.f ? 0.f : 1.f / total;
      const int row = (static_cast<int>(blockIdx.x) * kGroups + group_) * wgmma::kRows + wave * mma::kTile +
                      mma::slot_row(lane, slot);
      if (row >= shape.sequence) continue;
      const int64_t to = output_row(shape, row) + column;
#pragma unroll
      for (int piece = 0; piece < kOnesPiece; ++piece) {
        const int element = 4 * (piece % 2) + 2 * slot;
        const float values[] = {out_[piece / 2].x[element] * factor, out_[piece / 2].x[element + 1] * factor};
        if (piece * 8 < shape.head_size) output.store(to + piece * 8, values);
      }
    }
  }

 private:
  __device__ void wait_for_turn() {
    bulk::wait(lds_.turn(group_), turn_parity_ ^ (group_ == 0));  // the first group's first turn is at once
    turn_parity_ ^= 1;
  }
  __device__ void pass_turn() { bulk::arrive_wave(lds_.turn(group_ + 1 < kGroups ? group_ + 1 : 0)); }

  __device__ void begin_scores() {
    bulk::wait(lds_.filled(kKey, key_ring_.stage), key_ring_.parity);
    const uint64_t queries = wgmma::descriptor(lds_.queries(group_), 16, wgmma::kAtomBytes);
    const uint64_t keys = wgmma::descriptor(lds_.tile(kKey, key_ring_.stage), 16, wgmma::kAtomBytes);
    wgmma::fence();
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      constexpr int kBytes = mma::kTile * sizeof(T);
      wgmma::multiply<T>(scores_, wgmma::advance(queries, h * kBytes), wgmma::advance(keys, h * kBytes), h > 0);
    }
    wgmma::commit();
  }
  __device__ void finish_scores(int first_key) {
    wgmma::settle(scores_);
    bulk::arrive_wave(lds_.emptied(kKey, key_ring_.stage));
    key_ring_.next();
    if (!edges_.all_visible(0, first_key + kKeys - 1)) edges_.hide(scores_, 0, first_key);
  }

  __device__ void begin_sums(const Weights& weights) {
    bulk::wait(lds_.filled(kValue, value_ring_.stage), value_ring_.parity);
    const uint64_t values = wgmma::descriptor(lds_.tile(kValue, value_ring_.stage), 16, wgmma::kAtomBytes);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      wgmma::multiply_add<T>(out_, weights[k], wgmma::advance(values, k * mma::kTile * wgmma::kRowBytes));
    }
    wgmma::commit();
  }
  __device__ void finish_sums() {
    wgmma::settle(out_);
    bulk::arrive_wave(lds_.emptied(kValue, value_ring_.stage));
    value_ring_.next();
  }

  // Replaces scores by weights 2^(score - largest_). A row's largest_ only moves when a score exceeds it by kSlack, so
  // that weights stay below 2^kSlack. Returns whether it has moved in any row of the wave.
  template <bool kIsFirst>
  __device__ bool softmax() {
    constexpr float kSlack = 8.f;
    const float factor = edges_.factor();
    float largest[mma::kRowsPerLane][2];  // of even and odd columns
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) {
        float& x = largest[mma::row_slot(i)][i % 2];
        x = k == 0 && i < 4 ? scores_[k].x[i] : fmaxf(x, scores_[k].x[i]);
      }
    }
    bool moves = kIsFirst;
    float shift[mma::kRowsPerLane];
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      shift[slot] = mma::reduce_row<Max>(fmaxf(largest[slot][0], largest[slot][1])) * factor;
      if constexpr (!kIsFirst) moves |= shift[slot] > largest_[slot] + kSlack;
    }
    if constexpr (!kIsFirst) moves = any_lane(moves);
    if (moves) {
#pragma unroll
      for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
        const float before = kIsFirst ? -INFINITY : largest_[slot];
        largest_[slot] = fmaxf(before, shift[slot]);
        rescale_[slot] = before == largest_[slot] ? 1.f : power_of_two(before - largest_[slot]);
      }
    }
#pragma unroll
    for (int slot = 0; slot < mma::kRowsPerLane; ++slot) {
      shift[slot] = largest_[slot] == -INFINITY ? 0.f : -largest_[slot];  // a row of only -infinity gives zeros
    }
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) {
        scores_[k].x[i] = power_of_two(fmaf(scores_[k].x[i], factor, shift[mma::row_slot(i)]));
      }
    }
    return moves;
  }
  __device__ void rescale() {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < mma::kAccumulatorSize; ++i) out_[h].x[i] *= rescale_[mma::row_slot(i)];
    }
  }
  __device__ void round(Weights& weights) const {
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) weights[k] = mma::to_operand<T>(scores_[k]);
  }

  const Lds& lds_;
  const int group_;
  const ScoreEdges<T>& edges_;
  mma::Accumulator scores_[kKeyTiles], out_[kHeadTiles];  // out_: of weighted values, and of the weights
  float largest_[mma::kRowsPerLane], rescale_[mma::kRowsPerLane];
  bulk::Ring<kStages> key_ring_, value_ring_;
  uint32_t turn_parity_ = 0;
};

// Work of a block.
template <class T>
__device__ void attend(const Head<T>& head, const QuantizedOutput<T>& output, const AttentionShape& shape) {
  SD_ORT_DYNAMIC_LDS(char, memory);
  const Lds lds = {wgmma::address_of(memory)};
  const int group = static_cast<int>(threadIdx.x) / wgmma::kThreads - 1;
  if (threadIdx.x == 0) lds.init_barriers();
  if (group >= 0) {
    const int first_query = (static_cast<int>(blockIdx.x) * kGroups + group) * wgmma::kRows;
    RowCopies<T, wgmma::kRows>().begin(memory + group * wgmma::kRows * wgmma::kRowBytes, head.query, first_query,
                                       kPieces);
  }
  for (int row = threadIdx.x; row < kStages * kKeys; row += kThreads) {
    const uint32_t one_and_zeros[4] = {mma::pack<T>(1.f, 0.f), 0, 0, 0};
    char* const piece = memory + kValuesAt + wgmma::piece_offset(row, kOnesPiece);
    memcpy(__builtin_assume_aligned(piece, 16), one_and_zeros, sizeof(one_and_zeros));
  }
  mma::wait_for_copies();
  wgmma::fence_stores();
  block_barrier();
  if (group < 0) {
    wgmma::give_registers_but<kCopyRegisters>();
    load_tiles(lds, memory, head, (shape.kv_sequence + kKeys - 1) / kKeys);
  } else {
    wgmma::take_registers<kGroupRegisters>();
    Group<T> work(lds, group, head.edges);
    work.run();
    work.write(output, shape);
  }
}

}  // namespace pingpong

template <class T>
__global__ __launch_bounds__(pingpong::kThreads,
                             1) void pingpong_attention_kernel(const T* query, const T* key, const T* value, const T*,
                                                               QuantizedOutput<T> output, AttentionShape shape) {
  wait_for_predecessor();
#if defined(SD_ORT_WGMMA)
  pingpong::attend(Head<T>(query, key, value, nullptr, shape), output, shape);
#endif
}

namespace {

template <class T>
const char* run_pingpong(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(pingpong_attention_kernel<T>, p, ceil_div(p.sequence, pingpong::kQueries),
                             pingpong::kThreads, stream, pingpong::kLdsBytes);
}

}  // namespace

const char* attention_pingpong(const MultiHeadAttentionParams& p, void* stream) {
  return p.dtype == DType::kFloat16 ? run_pingpong<half_t>(p, stream) : run_pingpong<bf16_t>(p, stream);
}

#else

const char* attention_pingpong(const MultiHeadAttentionParams&, void*) { return "no warpgroups here"; }

#endif
}  // namespace sd_ort
