// Copies single elements: a function `Move<T> operator()(uint32_t i) const` returns source and target of element i. A
// thread copies kMoved elements and reads all before it writes the first, to have enough bytes in flight.
//
// Launch: block (256, 1, 1), grid (ceil(count / (256 * kMoved)), 1, 1), no LDS.
#pragma once

#include "common/divisor.h"
#include "provider/kernels/for_each.h"

namespace sd_ort {

template <class T>
struct Move {
  const T* from;
  T* to;
  bool enabled;  // false: nothing is copied
};

#if SD_ORT_SIMULATED
template <class T, class Function>
const char* move_each(int64_t count, const Function& function, void* stream) {
  struct CopyFunction {
    Function function;
    void operator()(uint32_t i) const {
      const Move<T> move = function(i);
      if (move.enabled) *move.to = *move.from;
    }
  };
  return for_each(count, CopyFunction{function}, stream);
}
#else
template <class T, int kMoved, class Function>
__global__ __launch_bounds__(256) void move_kernel(Function function, uint32_t count) {
  wait_for_predecessor();
  const uint32_t first = blockIdx.x * (256 * kMoved) + threadIdx.x;
  T values[kMoved];
  Move<T> moves[kMoved];
#pragma unroll
  for (int k = 0; k < kMoved; ++k) {
    const uint32_t i = first + k * 256;
    moves[k] = function(i < count ? i : count - 1);
    moves[k].enabled = moves[k].enabled && i < count;
    if (moves[k].enabled) values[k] = *moves[k].from;
  }
#pragma unroll
  for (int k = 0; k < kMoved; ++k) {
    if (moves[k].enabled) *moves[k].to = values[k];
  }
}

template <class T, class Function>
const char* move_each(int64_t count, const Function& function, void* stream) {
  constexpr int64_t kMany = 1 << 18;  // with fewer elements, one per thread occupies more multiprocessors
  if (count == 0) return nullptr;
  if (count > INT32_MAX) return "a tensor has more than 2^31 elements";
  const auto with = [&](auto kernel, int64_t moved) {
    return launch(kernel, dim3(ceil_div(count, 256 * moved)), dim3(256), 0, stream, function, count);
  };
  return count < kMany ? with(move_kernel<T, 1, Function>, 1) : with(move_kernel<T, 4, Function>, 4);
}
#endif

}  // namespace sd_ort
