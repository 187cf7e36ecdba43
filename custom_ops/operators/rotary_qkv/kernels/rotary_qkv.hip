// RotaryQkv on a GPU. Bandwidth bound: query, key and value of a head are read and written once.
//
// Launch: block (256, 1, 1), grid (ceil(heads / (256 / kLanes)), 1, 1), no LDS; heads of all tokens and images.
#include "common/gpu.h"
#include "common/reduce.h"
#include "operators/rotary_qkv/op.h"

namespace sd_ort {

// The arguments of one stream, as in RotaryQkvStream.
template <class T>
struct RotaryQkvSource {
  const T* qkv;
  const T* q_scale;
  const T* k_scale;
  uint32_t length;
};

// Elements `low` and `high` of the same thread are pairs 0 .. kPairs - 1: neighbors in order with `interleaved`.
template <int kPairs>
__device__ inline void rotary_qkv_turn(float (&low)[kPairs], float (&high)[kPairs], const float (&cos)[kPairs],
                                       const float (&sin)[kPairs], bool interleaved) {
  float a[kPairs], b[kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int even = 2 * k, odd = 2 * k + 1;
    const float left = interleaved ? (even < kPairs ? low[even % kPairs] : high[even % kPairs]) : low[k];
    const float right = interleaved ? (odd < kPairs ? low[odd % kPairs] : high[odd % kPairs]) : high[k];
    a[k] = left * cos[k] - right * sin[k];
    b[k] = left * sin[k] + right * cos[k];
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int upper = kPairs + k;
    low[k] = !interleaved ? a[k] : k % 2 == 0 ? a[k / 2] : b[k / 2];
    high[k] = !interleaved ? b[k] : upper % 2 == 0 ? a[upper / 2] : b[upper / 2];
  }
}

// A head of a token, of one of the streams.
template <class T>
struct RotaryQkvHead {
  RotaryQkvSource<T> source;
  const T* from;
  T* to;
  uint32_t token;

  __device__ RotaryQkvHead(const RotaryQkvSource<T>& first, const RotaryQkvSource<T>& second, T* y, uint32_t index,
                           uint32_t heads, uint32_t pairs) {
    const uint32_t length = first.length + second.length, head = index % heads;
    const uint32_t row = index / heads, image = row / length;
    token = row % length;
    const bool is_first = token < first.length;
    source = is_first ? first : second;
    const uint32_t source_token = is_first ? token : token - first.length;
    const int64_t source_row = static_cast<int64_t>(image) * source.length + source_token;
    from = source.qkv + (source_row * heads + head) * 6 * pairs;
    to = y + static_cast<int64_t>(index) * 6 * pairs;
  }
};

// 32 threads iterate over the pairs of a head, one each at a time.
template <class T>
__global__ __launch_bounds__(256) void rotary_qkv_generic(RotaryQkvSource<T> first, RotaryQkvSource<T> second,
                                                          const T* cos, const T* sin, T* y, uint32_t count,
                                                          uint32_t heads, uint32_t pairs, float epsilon,
                                                          bool interleaved) {
  wait_for_predecessor();
  const uint32_t wanted = blockIdx.x * 8 + threadIdx.x / 32, begin = threadIdx.x % 32;
  // Threads past the end repeat the last head and store nothing: all threads take part in the reductions.
  const RotaryQkvHead<T> head(first, second, y, min(wanted, count - 1), heads, pairs);
  const uint32_t step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs;
  float factors[2] = {1.f, 1.f};
  // Also for a stream without a norm beside one with it: a wave may have heads of both.
  if (first.q_scale != nullptr || second.q_scale != nullptr) {
    for (int part = 0; part < 2; ++part) {
      float squares = 0.f;
      for (uint32_t i = begin; i < 2 * pairs; i += 32) {
        const float value = to_float(head.from[part * 2 * pairs + i]);
        squares += value * value;
      }
      factors[part] = rsqrtf(wave_reduce<Sum, 32>(squares) / static_cast<float>(2 * pairs) + epsilon);
    }
  }
  if (wanted >= count) return;
  for (uint32_t pair = begin; pair < pairs; pair += 32) {
    const int64_t angle = static_cast<int64_t>(head.token) * pairs + pair;
    for (int part = 0; part < 3; ++part) {
      const uint32_t low = part * 2 * pairs + pair * step, high = low + other;
      if (part == 2) {
        head.to[low] = head.from[low];
        head.to[high] = head.from[high];
        break;
      }
      float a = to_float(head.from[low]), b = to_float(head.from[high]);
      if (head.source.q_scale != nullptr) {
        const T* scale = part == 0 ? head.source.q_scale : head.source.k_scale;
        a *= factors[part] * to_float(scale[pair * step]);
        b *= factors[part] * to_float(scale[pair * step + other]);
      }
      const float c = cos == nullptr ? 1.f : to_float(cos[angle]), s = cos == nullptr ? 0.f : to_float(sin[angle]);
      head.to[low] = from_float<T>(cos == nullptr ? a : a * c - b * s);
      head.to[high] = from_float<T>(cos == nullptr ? b : a * s + b * c);
    }
  }
}

// kLanes threads have a head in registers, kPairs adjacent pairs each.
template <class T, int kPairs, int kLanes>
__global__ __launch_bounds__(256) void rotary_qkv_kernel(RotaryQkvSource<T> first, RotaryQkvSource<T> second,
                                                         const T* cos, const T* sin, T* y, uint32_t count,
                                                         uint32_t heads, uint32_t pairs, float epsilon,
                                                         bool interleaved) {
  wait_for_predecessor();
  using Pack = Vec<T, kPairs>;
  const uint32_t wanted = blockIdx.x * (256 / kLanes) + threadIdx.x / kLanes;
  const RotaryQkvHead<T> head(first, second, y, min(wanted, count - 1), heads, pairs);
  const uint32_t pair = threadIdx.x % kLanes * kPairs;
  const bool has_pairs = pair < pairs, copies = head.to != head.from;
  const uint32_t low_at = interleaved ? 2 * pair : pair, high_at = low_at + (interleaved ? kPairs : pairs);
  Pack low_raw[3], high_raw[3];
  if (has_pairs) {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      if (part == 2 && !copies) break;
      low_raw[part] = Pack::load(head.from + part * 2 * pairs + low_at);
      high_raw[part] = Pack::load(head.from + part * 2 * pairs + high_at);
    }
  }
  float low[2][kPairs] = {}, high[2][kPairs] = {}, factors[2] = {1.f, 1.f};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (has_pairs) {
      low_raw[part].unpack(low[part]);
      high_raw[part].unpack(high[part]);
    }
    // Also for a stream without a norm beside one with it: a wave may have heads of both.
    if (first.q_scale == nullptr && second.q_scale == nullptr) continue;
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) squares += low[part][k] * low[part][k] + high[part][k] * high[part][k];
    factors[part] = rsqrtf(wave_reduce<Sum, kLanes>(squares) / static_cast<float>(2 * pairs) + epsilon);
  }
  if (wanted >= count || !has_pairs) return;
  float c[kPairs], s[kPairs];
  if (cos != nullptr) {
    Pack::load(cos + static_cast<int64_t>(head.token) * pairs + pair).unpack(c);
    Pack::load(sin + static_cast<int64_t>(head.token) * pairs + pair).unpack(s);
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (head.source.q_scale != nullptr) {
      const T* scale = part == 0 ? head.source.q_scale : head.source.k_scale;
      float low_scale[kPairs], high_scale[kPairs];
      Pack::load(scale + low_at).unpack(low_scale);
      Pack::load(scale + high_at).unpack(high_scale);
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        low[part][k] *= factors[part] * low_scale[k];
        high[part][k] *= factors[part] * high_scale[k];
      }
    }
    if (cos != nullptr) rotary_qkv_turn<kPairs>(low[part], high[part], c, s, interleaved);
    Pack::pack(low[part]).store(head.to + part * 2 * pairs + low_at);
    Pack::pack(high[part]).store(head.to + part * 2 * pairs + high_at);
  }
  if (!copies) return;
  low_raw[2].store(head.to + 4 * pairs + low_at);
  high_raw[2].store(head.to + 4 * pairs + high_at);
}

namespace {

template <class T, int kPairs, int kLanes>
const char* rotary_qkv_heads(const RotaryQkvParams& p, void* stream) {
  const int64_t count = p.batch * p.length() * p.heads;
  if (count == 0) return nullptr;
  if (count > INT32_MAX || 6 * p.pairs > INT32_MAX) return "more than 2^31 heads or elements of a head";
  const auto source = [](const RotaryQkvStream& stream) {
    return RotaryQkvSource<T>{static_cast<const T*>(stream.qkv), static_cast<const T*>(stream.q_scale),
                              static_cast<const T*>(stream.k_scale), static_cast<uint32_t>(stream.length)};
  };
  const auto run = [&](auto kernel) {
    return launch(kernel, dim3(ceil_div(count, 256 / kLanes)), dim3(256), 0, stream, source(p.first), source(p.second),
                  static_cast<const T*>(p.cos), static_cast<const T*>(p.sin), static_cast<T*>(p.y), count, p.heads,
                  p.pairs, p.epsilon, p.interleaved != 0);
  };
  if constexpr (kPairs == 1) {
    return run(rotary_qkv_generic<T>);
  } else {
    return run(rotary_qkv_kernel<T, kPairs, kLanes>);
  }
}

}  // namespace

const char* rotary_qkv_launch(const RotaryQkvParams& p, int lanes, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kPairs = 8 / sizeof(T);
    if (lanes == 0) return rotary_qkv_heads<T, 1, 32>(p, stream);
    return lanes == 8 ? rotary_qkv_heads<T, kPairs, 8>(p, stream) : rotary_qkv_heads<T, kPairs, 16>(p, stream);
  });
}

}  // namespace sd_ort
