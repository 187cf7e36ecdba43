// Reductions, Softmax and GEMM with one thread per output or row, for the few nodes that no fusion replaced. Fused
// operators have their kernels in operators/.
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
  // Reduces every `step`-th input of output i, starting with `first`.
  SD_ORT_DEVICE float partial(uint32_t i, int64_t first, int64_t step) const {
    const int64_t outer = i / static_cast<uint32_t>(inner), column = i % static_cast<uint32_t>(inner);
    const T* from = x + outer * size * inner + column;
    float total = op == Reduction::kMax ? -INFINITY : op == Reduction::kMin ? INFINITY : 0.f;
    for (int64_t k = first; k < size; k += step) total = merge(total, to_float(from[k * inner]));
    return total;
  }
  SD_ORT_DEVICE void write(uint32_t i, float total) const {
    y[i] = from_float<T>(op == Reduction::kMean ? total / static_cast<float>(size) : total);
  }
  SD_ORT_DEVICE void operator()(uint32_t i) const { write(i, partial(i, 0, 1)); }
};

#if !SD_ORT_SIMULATED
constexpr int kReducers = 512;

// One block per output, for few outputs with many inputs.
//
// Launch: block (512, 1, 1), grid (outputs, 1, 1), no dynamic LDS.
template <class T>
__global__ __launch_bounds__(kReducers) void reduce_kernel(Reduce<T> reduce) {
  wait_for_predecessor();
  __shared__ float partials[kReducers];
  const int thread = static_cast<int>(threadIdx.x);
  partials[thread] = reduce.partial(blockIdx.x, thread, kReducers);
  for (int half = kReducers / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread < half) partials[thread] = reduce.merge(partials[thread], partials[thread + half]);
  }
  if (thread == 0) reduce.write(blockIdx.x, partials[0]);
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
struct GemmElement {
  GemmParams p;
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

}  // namespace

const char* reduce(Reduction op, DType dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner,
                   void* stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Reduce<T> function{op, static_cast<const T*>(x), static_cast<T*>(y), size, inner};
#if !SD_ORT_SIMULATED
    if (size > kReducers && outer * inner > 0 && outer * inner <= 65535) {
      return launch(reduce_kernel<T>, dim3(outer * inner), dim3(kReducers), 0, stream, function);
    }
#endif
    return for_each(outer * inner, function, stream);
  });
}

const char* softmax_rows(DType dtype, const void* x, void* y, int64_t rows, int64_t columns, void* stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return for_each(rows, SoftmaxRow<T>{static_cast<const T*>(x), static_cast<T*>(y), columns}, stream);
  });
}

const char* gemm_launch(const GemmParams& p, void* stream) {
  return with_type(p.dtype, [&](auto type) {
    return for_each(p.batch * p.rows * p.columns, GemmElement<typename decltype(type)::type>{p}, stream);
  });
}

}  // namespace sd_ort
