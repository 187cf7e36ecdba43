// Softmax of rows on a GPU: a block a row. Three reads, of which the cache serves two.
//
// softmax_kernel<T, kVec>: Launch: block (256, 1, 1), grid (rows, 1, 1), static LDS only; needs columns % kVec == 0 and
//   rows aligned to kVec elements.
#include "common/gpu.h"
#include "common/math.h"
#include "common/reduce.h"
#include "softmax/op.h"

namespace sd_ort {

constexpr int kSoftmaxBlock = 256;

template <class T, int kVec>
__global__ __launch_bounds__(kSoftmaxBlock) void softmax_kernel(const float* scores, T* weights, int columns) {
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
  sum = block_reduce<Sum, kSoftmaxBlock>(sum, shared + max_waves(kSoftmaxBlock));
  const float inverse = 1.f / sum;
  for (int i = begin; i < columns; i += step) {
    Vec<float, kVec>::load(from + i).unpack(v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) v[k] = exponential(v[k] - largest) * inverse;
    Vec<T, kVec>::pack(v).store(to + i);
  }
}

namespace {

template <class T>
const char* launch_type(const SoftmaxParams& p, void* stream) {
  constexpr int kVec = 4;
  const bool wide =
      p.columns % kVec == 0 && are_aligned<kVec * sizeof(float)>(p.scores) && are_aligned<kVec * sizeof(T)>(p.weights);
  const auto kernel = wide ? softmax_kernel<T, kVec> : softmax_kernel<T, 1>;
  return launch(kernel, dim3(p.rows), dim3(kSoftmaxBlock), 0, stream, static_cast<const float*>(p.scores),
                static_cast<T*>(p.weights), p.columns);
}

}  // namespace

const char* softmax_launch(const SoftmaxParams& p, void* stream) {
  if (p.rows * p.columns == 0) return nullptr;
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_type<float>(p, stream);
    case DType::kFloat16:
      return launch_type<half_t>(p, stream);
    default:
      return launch_type<bf16_t>(p, stream);
  }
}

}  // namespace sd_ort
