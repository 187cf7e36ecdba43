// RotaryEmbedding on a GPU. Bandwidth bound: a thread turns kPairs adjacent pairs of a head.
//
// Launch: block (256, 1, 1), grid (ceil(threads / 256), 1, 1), no LDS; threads = elements / (2 * kPairs).
#include "common/gpu.h"
#include "operators/rotary_embedding/op.h"

namespace sd_ort {

template <class T, int kPairs>
__global__ __launch_bounds__(256) void rotary_embedding_kernel(const T* x, const void* positions, const T* cos,
                                                               const T* sin, T* y, uint32_t threads, uint32_t length,
                                                               uint32_t heads, uint32_t pairs,
                                                               kernel_int64_t table_rows, bool interleaved) {
  wait_for_predecessor();
  const uint32_t thread = blockIdx.x * 256 + threadIdx.x;
  if (thread >= threads) return;
  const uint32_t threads_a_head = pairs / kPairs;
  const uint32_t head = thread / threads_a_head, pair = thread % threads_a_head * kPairs;
  const int64_t position = *static_cast<const int64_t*>(positions) + head / heads % length;
  const int64_t row = position < 0 ? 0 : position < table_rows ? position : table_rows - 1;
  const int64_t begin = static_cast<int64_t>(head) * 2 * pairs;
  const int64_t first = begin + (interleaved ? 2 * pair : pair);
  const int64_t second = interleaved ? first + kPairs : first + pairs;  // of the two accesses
  float c[kPairs], s[kPairs], low[kPairs], high[kPairs], a[kPairs], b[kPairs];
  Vec<T, kPairs>::load(cos + row * pairs + pair).unpack(c);
  Vec<T, kPairs>::load(sin + row * pairs + pair).unpack(s);
  Vec<T, kPairs>::load(x + first).unpack(low);
  Vec<T, kPairs>::load(x + second).unpack(high);
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int even = 2 * k, odd = 2 * k + 1;
    const float left = interleaved ? (even < kPairs ? low[even % kPairs] : high[even % kPairs]) : low[k];
    const float right = interleaved ? (odd < kPairs ? low[odd % kPairs] : high[odd % kPairs]) : high[k];
    a[k] = left * c[k] - right * s[k];
    b[k] = left * s[k] + right * c[k];
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int upper = kPairs + k;
    low[k] = !interleaved ? a[k] : k % 2 == 0 ? a[k / 2] : b[k / 2];
    high[k] = !interleaved ? b[k] : upper % 2 == 0 ? a[upper / 2] : b[upper / 2];
  }
  Vec<T, kPairs>::pack(low).store(y + first);
  Vec<T, kPairs>::pack(high).store(y + second);
}

namespace {

template <class T, int kPairs>
const char* rotary_embedding_pairs(const RotaryEmbeddingParams& p, void* stream) {
  const int64_t threads = p.batch * p.length * p.heads * p.pairs / kPairs;
  if (threads == 0) return nullptr;
  if (threads > INT32_MAX) return "more than 2^31 pairs";
  return launch(rotary_embedding_kernel<T, kPairs>, dim3(ceil_div(threads, 256)), dim3(256), 0, stream,
                static_cast<const T*>(p.x), p.positions, static_cast<const T*>(p.cos), static_cast<const T*>(p.sin),
                static_cast<T*>(p.y), threads, p.length, p.heads, p.pairs, p.table_rows, p.interleaved != 0);
}

}  // namespace

const char* rotary_embedding_launch(const RotaryEmbeddingParams& p, bool vectors, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return vectors ? rotary_embedding_pairs<T, 8 / sizeof(T)>(p, stream) : rotary_embedding_pairs<T, 1>(p, stream);
  });
}

}  // namespace sd_ort
