// Softmax of rows on a GPU: one block per row.
//
// softmax_kernel<T, kVec, kItems>: rows of up to 512 * kVec * kItems elements in registers: one read.
//   Launch: block (512, 1, 1), grid (rows, 1, 1), static LDS only; needs columns % kVec == 0, columns <= 512 * kVec *
//   kItems, and rows aligned to kVec elements.
// long_softmax_kernel<T, kVec>: any length, three reads. Launch: the same, any number of columns.
#include "common/gpu.h"
#include "common/math.h"
#include "common/reduce.h"
#include "operators/softmax/op.h"

namespace sd_ort {

constexpr int kSoftmaxBlock = 512;

template <class T, int kVec, int kItems>
__global__ __launch_bounds__(kSoftmaxBlock) void softmax_kernel(const float* scores, T* weights, int columns) {
  wait_for_predecessor();
  __shared__ float shared[2 * max_waves(kSoftmaxBlock)];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * columns;
  const int begin = kVec * static_cast<int>(threadIdx.x), step = kVec * kSoftmaxBlock;
  float values[kItems][kVec];
  float largest = -INFINITY;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const bool inside = begin + item * step < columns;
    if (inside) Vec<float, kVec>::load(scores + row + begin + item * step).unpack(values[item]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (!inside) values[item][k] = -INFINITY;  // weight 0
      largest = fmaxf(largest, values[item][k]);
    }
  }
  largest = block_reduce<Max, kSoftmaxBlock>(largest, shared);
  float sum = 0.f;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      values[item][k] = exponential(values[item][k] - largest);
      sum += values[item][k];
    }
  }
  const float inverse = 1.f / block_reduce<Sum, kSoftmaxBlock>(sum, shared + max_waves(kSoftmaxBlock));
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[item][k] *= inverse;
    if (begin + item * step < columns) {
      Vec<T, kVec>::pack(values[item]).store(weights + row + begin + item * step);
    }
  }
}

template <class T, int kVec>
__global__ __launch_bounds__(kSoftmaxBlock) void long_softmax_kernel(const float* scores, T* weights, int columns) {
  wait_for_predecessor();
  __shared__ float shared[2 * max_waves(kSoftmaxBlock)];
  const float* const from = scores + static_cast<int64_t>(blockIdx.x) * columns;
  T* const to = weights + static_cast<int64_t>(blockIdx.x) * columns;
  const int begin = kVec * static_cast<int>(threadIdx.x), step = kVec * kSoftmaxBlock;
  float v[kVec];
  float largest = -INFINITY;
  for (int i = begin; i < columns; i += step) {
    Vec<float, kVec>::load(from + i).unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) largest = fmaxf(largest, v[k]);
  }
  largest = block_reduce<Max, kSoftmaxBlock>(largest, shared);
  float sum = 0.f;
  for (int i = begin; i < columns; i += step) {
    Vec<float, kVec>::load(from + i).unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum += exponential(v[k] - largest);
  }
  const float inverse = 1.f / block_reduce<Sum, kSoftmaxBlock>(sum, shared + max_waves(kSoftmaxBlock));
  for (int i = begin; i < columns; i += step) {
    Vec<float, kVec>::load(from + i).unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) v[k] = exponential(v[k] - largest) * inverse;
    Vec<T, kVec>::pack(v).store(to + i);
  }
}

namespace {

template <class T, int kVec>
const char* launch_width(const SoftmaxParams& p, bool in_registers, void* stream) {
  constexpr int kFew = 8 / kVec, kMany = SoftmaxConfig::kMaxColumns / kSoftmaxBlock / kVec;
  const auto kernel = !in_registers                              ? long_softmax_kernel<T, kVec>
                      : p.columns <= kSoftmaxBlock * kVec * kFew ? softmax_kernel<T, kVec, kFew>
                                                                 : softmax_kernel<T, kVec, kMany>;
  return launch(kernel, dim3(p.rows), dim3(kSoftmaxBlock), 0, stream, static_cast<const float*>(p.scores),
                static_cast<T*>(p.weights), p.columns);
}

}  // namespace

const char* softmax_launch(const SoftmaxParams& p, const SoftmaxConfig& config, void* stream) {
  if (p.rows == 0 || p.columns == 0) return nullptr;
  return with_type(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return config.vectors ? launch_width<T, 4>(p, config.in_registers, stream)
                          : launch_width<T, 1>(p, config.in_registers, stream);
  });
}

}  // namespace sd_ort
