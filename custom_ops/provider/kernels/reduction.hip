// Sums over an axis, rows of Softmax and LayerNormalization, and matrix products, most a thread an output or a row: for
// the few of them that no fusion took. What is fused has kernels of its own in the operators' folders.
#include "provider/kernels/for_each.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

template <class T>
struct Reduce {
  Reduction op;
  const T* x;
  T* y;
  int64_t size, inner;

  SD_ORT_DEVICE float merge(float total, float value) const {
    if (op == Reduction::kMax) return value > total || value != value ? value : total;
    if (op == Reduction::kMin) return value < total || value != value ? value : total;
    return total + value;
  }
  // Of output i's numbers every `step`th from `first` on.
  SD_ORT_DEVICE float part(uint32_t i, int64_t first, int64_t step) const {
    const int64_t outer = i / static_cast<uint32_t>(inner), column = i % static_cast<uint32_t>(inner);
    const T* from = x + outer * size * inner + column;
    float total = op == Reduction::kMax ? -INFINITY : op == Reduction::kMin ? INFINITY : 0.f;
    for (int64_t k = first; k < size; k += step) total = merge(total, to_float(from[k * inner]));
    return total;
  }
  SD_ORT_DEVICE void write(uint32_t i, float total) const {
    y[i] = from_float<T>(op == Reduction::kMean ? total / static_cast<float>(size) : total);
  }
  SD_ORT_DEVICE void operator()(uint32_t i) const { write(i, part(i, 0, 1)); }
};

#if !SD_ORT_SIMULATED
constexpr int kReducers = 512;

// A block an output, where outputs are few and their numbers many.
//
// Launch: block (512, 1, 1), grid (outputs, 1, 1), no dynamic LDS.
template <class T>
__global__ __launch_bounds__(kReducers) void reduce_kernel(Reduce<T> reduce) {
  wait_for_predecessor();
  __shared__ float parts[kReducers];
  const int thread = static_cast<int>(threadIdx.x);
  parts[thread] = reduce.part(blockIdx.x, thread, kReducers);
  for (int half = kReducers / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread < half) parts[thread] = reduce.merge(parts[thread], parts[thread + half]);
  }
  if (thread == 0) reduce.write(blockIdx.x, parts[0]);
}
#endif

template <class T>
struct SoftmaxRow {
  const T* x;
  T* y;
  int64_t columns;
  SD_ORT_DEVICE void operator()(uint32_t row) const {
    const T* from = x + row * columns;
    T* to = y + row * columns;
    float largest = -INFINITY, total = 0.f;
    for (int64_t c = 0; c < columns; ++c) largest = fmaxf(largest, to_float(from[c]));
    for (int64_t c = 0; c < columns; ++c) total += expf(to_float(from[c]) - largest);
    for (int64_t c = 0; c < columns; ++c) to[c] = from_float<T>(expf(to_float(from[c]) - largest) / total);
  }
};

template <class T>
struct LayerNormRow {
  const T* x;
  const T* gamma;
  const T* beta;
  T* y;
  int64_t columns;
  float epsilon;
  SD_ORT_DEVICE void operator()(uint32_t row) const {
    const T* from = x + row * columns;
    float mean = 0.f, variance = 0.f;
    for (int64_t c = 0; c < columns; ++c) mean += to_float(from[c]);
    mean /= static_cast<float>(columns);
    for (int64_t c = 0; c < columns; ++c) {
      const float difference = to_float(from[c]) - mean;
      variance += difference * difference;
    }
    const float scale = 1.f / sqrtf(variance / static_cast<float>(columns) + epsilon);
    for (int64_t c = 0; c < columns; ++c) {
      const float shift = beta == nullptr ? 0.f : to_float(beta[c]);
      y[row * columns + c] = from_float<T>((to_float(from[c]) - mean) * scale * to_float(gamma[c]) + shift);
    }
  }
};

template <class T>
struct Product {
  ProductParams p;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const uint32_t columns = static_cast<uint32_t>(p.columns), rows = static_cast<uint32_t>(p.rows);
    const int64_t column = i % columns, row = i / columns % rows, batch = i / columns / rows;
    const T* x = static_cast<const T*>(p.x) + batch * p.x_batch_stride + row * p.inner;
    const T* weight =
        static_cast<const T*>(p.weight) + batch * p.weight_batch_stride + (p.transposed ? column * p.inner : column);
    const int64_t step = p.transposed ? 1 : p.columns;
    float total = 0.f;
    for (int64_t k = 0; k < p.inner; ++k) total += to_float(x[k]) * to_float(weight[k * step]);
    total *= p.scale;
    if (p.bias != nullptr) total += to_float(static_cast<const T*>(p.bias)[column]);
    static_cast<T*>(p.y)[i] = from_float<T>(total);
  }
};

template <class Launch>
const char* by_type(DType dtype, Launch launch) {
  switch (dtype) {
    case DType::kFloat32:
      return launch(float{});
    case DType::kFloat16:
      return launch(half_t{});
    default:
      return launch(bf16_t{});
  }
}

}  // namespace

const char* reduce(Reduction op, DType dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner,
                   void* stream) {
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    const Reduce<T> each{op, static_cast<const T*>(x), static_cast<T*>(y), size, inner};
#if !SD_ORT_SIMULATED
    if (size > kReducers && outer * inner > 0 && outer * inner <= 65535) {
      return launch(reduce_kernel<T>, dim3(outer * inner), dim3(kReducers), 0, stream, each);
    }
#endif
    return for_each(outer * inner, each, stream);
  });
}

const char* softmax_rows(DType dtype, const void* x, void* y, int64_t rows, int64_t columns, void* stream) {
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(rows, SoftmaxRow<T>{static_cast<const T*>(x), static_cast<T*>(y), columns}, stream);
  });
}

const char* layer_norm_rows(DType dtype, const void* x, const void* gamma, const void* beta, void* y, int64_t rows,
                            int64_t columns, float epsilon, void* stream) {
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(rows,
                    LayerNormRow<T>{static_cast<const T*>(x), static_cast<const T*>(gamma), static_cast<const T*>(beta),
                                    static_cast<T*>(y), columns, epsilon},
                    stream);
  });
}

const char* product_launch(const ProductParams& p, void* stream) {
  return by_type(p.dtype, [&](auto sample) {
    return for_each(p.batch * p.rows * p.columns, Product<decltype(sample)>{p}, stream);
  });
}

}  // namespace sd_ort
