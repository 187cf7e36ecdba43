// MultiHeadAttention without matrix instructions, for any type, alignment and head size: the reference of the other
// kernels.
//
// generic_attention_kernel<T, kColumnTiles>
//   Launch: block (256, 1, 1), grid (ceil(sequence / 64) * ceil(head_size / (64 * kColumnTiles)), heads, batch), no
//   dynamic LDS.
#include "operators/multi_head_attention/kernels/attention.h"

namespace sd_ort {

// Computes 64 queries x 64 keys per block of 256 threads in float32; a thread has 4 rows x 4 keys of the scores and 4
// rows x 4 columns of each 64 columns of the output. A block computes 64 * kColumnTiles columns of the output, and all
// scores.
template <class T, int kColumnTiles>
__global__ __launch_bounds__(256, 1) void generic_attention_kernel(const T* query, const T* key, const T* value,
                                                                   const T* attention_bias, QuantizedOutput<T> output,
                                                                   AttentionShape shape) {
  wait_for_predecessor();
  constexpr int kTile = 64, kDepth = 32, kThreads = 256;
  constexpr int kStride = kTile + 4;  // 16-byte rows; adjacent rows start 4 banks apart
  // For scores: kDepth rows of Q^T, then of K^T. Afterwards: 64 rows of V.
  alignas(16) __shared__ float stage[kTile][kStride];
  alignas(16) __shared__ float weights[kTile][kStride];  // (key, query)

  const int column_blocks = (shape.head_size + kTile * kColumnTiles - 1) / (kTile * kColumnTiles);
  const int first_column = blockIdx.x % column_blocks * kTile * kColumnTiles;
  const int first_query = blockIdx.x / column_blocks * kTile;
  const int thread = threadIdx.x;
  const int row = thread / 16 * 4, column = thread % 16 * 4;  // of the thread's 4 x 4
  const Head<T> head(query, key, value, attention_bias, shape);
  const ScoreEdges<T>& edges = head.edges;
  query = head.query.data;
  key = head.key.data;
  value = head.value.data;
  const int sequence = shape.sequence, kv_sequence = shape.kv_sequence, head_size = shape.head_size;

  float out[kColumnTiles][4][4] = {};
  float largest[4], sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest[i] = -INFINITY;
    sum[i] = 0.f;
  }

  const int end = keys_seen(shape, first_query, kTile);
  for (int first_key = 0; first_key < end; first_key += kTile) {
    float scores[4][4] = {};
    for (int depth = 0; depth < head_size; depth += kDepth) {
      block_barrier();
#pragma unroll 2
      for (int i = thread; i < kTile * kDepth; i += kThreads) {
        const int d = i % kDepth, r = i / kDepth;
        const bool inside = depth + d < head_size;
        const bool has_query = inside && first_query + r < sequence, has_key = inside && first_key + r < kv_sequence;
        stage[d][r] = has_query ? to_float(query[(first_query + r) * shape.query_row_stride + depth + d]) : 0.f;
        stage[kDepth + d][r] = has_key ? to_float(key[(first_key + r) * shape.key_row_stride + depth + d]) : 0.f;
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

    // Sixteen adjacent lanes share four rows.
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
        stage[r][i % kTile] = valid ? to_float(value[(first_key + r) * shape.value_row_stride + at]) : 0.f;
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
    const int64_t to = output_row(shape, at);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int to_column = first_column + c * kTile + column + j;
        if (at < sequence && to_column < head_size) output.store(to + to_column, out[c][i][j] * inverse);
      }
    }
  }
}

namespace {

template <class T, int kColumnTiles>
const char* launch_plain(const MultiHeadAttentionParams& p, void* stream) {
  return launch_attention<T>(generic_attention_kernel<T, kColumnTiles>, p,
                             ceil_div(p.sequence, 64) * ceil_div(p.head_size, 64 * kColumnTiles), 256, stream);
}

template <class T>
const char* run_plain(const MultiHeadAttentionParams& p, void* stream) {
  if (p.head_size <= 64) return launch_plain<T, 1>(p, stream);
  if (p.head_size <= 192) return launch_plain<T, 3>(p, stream);
  return launch_plain<T, 4>(p, stream);
}

}  // namespace

const char* attention_generic(const MultiHeadAttentionParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) { return run_plain<typename decltype(type)::type>(p, stream); });
}

}  // namespace sd_ort
