// Elementwise kernels, computed in float32, and casts between element types.
#include "common/float8.h"
#include "provider/kernels/for_each.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

SD_ORT_DEVICE float apply(Unary op, float x, float alpha) {
  switch (op) {
    case Unary::kAbs:
      return fabsf(x);
    case Unary::kCos:
      return cosf(x);
    case Unary::kErf:
      return erff(x);
    case Unary::kExp:
      return expf(x);
    case Unary::kGelu:
      return 0.5f * x * (1.f + erff(x * 0.70710678f));
    case Unary::kGeluTanh:
      return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case Unary::kLog:
      return logf(x);
    case Unary::kNeg:
      return -x;
    case Unary::kQuickGelu:
      return x / (1.f + expf(-alpha * x));
    case Unary::kReciprocal:
      return 1.f / x;
    case Unary::kRelu:
      return x > 0.f || x != x ? x : 0.f;  // NaN stays NaN
    case Unary::kRound:
      return rintf(x);  // half to even
    case Unary::kSigmoid:
      return 1.f / (1.f + expf(-x));
    case Unary::kSin:
      return sinf(x);
    case Unary::kSilu:
      return x / (1.f + expf(-x));
    case Unary::kSqrt:
      return sqrtf(x);
    default:
      return tanhf(x);
  }
}

SD_ORT_DEVICE float apply(Binary op, float a, float b) {
  switch (op) {
    case Binary::kAdd:
      return a + b;
    case Binary::kDiv:
      return a / b;
    case Binary::kMax:
      return a > b || a != a ? a : b;
    case Binary::kMin:
      return a < b || a != a ? a : b;
    case Binary::kMul:
      return a * b;
    case Binary::kPow:
      return powf(a, b);
    default:
      return a - b;
  }
}

template <int N>
struct ElementsAtOnce {
  static constexpr int kCount = N;
};

// Calls run(ElementsAtOnce<N>()) with as many elements as one access of 16 bytes holds, or 1 if arrays do not allow it.
template <class T, class Run, class... Arrays>
const char* in_vectors(int64_t count, Run run, Arrays... arrays) {
  constexpr int kCount = 16 / sizeof(T);
  const bool wide = count % kCount == 0 && are_aligned<16>(arrays...);
  return wide ? run(ElementsAtOnce<kCount>()) : run(ElementsAtOnce<1>());
}

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T x[N];
};

template <class T, int N>
struct UnaryFunction {
  Unary op;
  const T* x;
  T* y;
  float alpha;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    Vector<T, N> values = reinterpret_cast<const Vector<T, N>*>(x)[i];
    for (int k = 0; k < N; ++k) values.x[k] = from_float<T>(apply(op, to_float(values.x[k]), alpha));
    reinterpret_cast<Vector<T, N>*>(y)[i] = values;
  }
};

// Offsets of element i in two or three broadcast inputs.
struct Offsets {
  int64_t a = 0, b = 0, condition = 0;
  SD_ORT_DEVICE Offsets(const Broadcast& shape, uint32_t i) {
    for (int axis = shape.axes - 1; axis >= 0; --axis) {
      const uint32_t size = static_cast<uint32_t>(shape.sizes[axis]), at = i % size;
      i /= size;
      a += at * shape.a_strides[axis];
      b += at * shape.b_strides[axis];
      condition += at * shape.condition_strides[axis];
    }
  }
};

template <class T>
struct BinaryFunction {
  Binary op;
  Broadcast shape;
  const T* a;
  const T* b;
  T* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const Offsets at(shape, i);
    y[i] = from_float<T>(apply(op, to_float(a[at.a]), to_float(b[at.b])));
  }
};

// Without broadcasting.
template <class T, int N>
struct DenseBinaryFunction {
  Binary op;
  const T* a;
  const T* b;
  T* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    Vector<T, N> values = reinterpret_cast<const Vector<T, N>*>(a)[i];
    const Vector<T, N> others = reinterpret_cast<const Vector<T, N>*>(b)[i];
    for (int k = 0; k < N; ++k) values.x[k] = from_float<T>(apply(op, to_float(values.x[k]), to_float(others.x[k])));
    reinterpret_cast<Vector<T, N>*>(y)[i] = values;
  }
};

template <class T>
struct IntegerFunction {
  Binary op;
  Broadcast shape;
  const T* a;
  const T* b;
  T* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const Offsets at(shape, i);
    const T x = a[at.a], z = b[at.b];
    y[i] = op == Binary::kAdd   ? x + z
           : op == Binary::kMax ? (x > z ? x : z)
           : op == Binary::kMin ? (x < z ? x : z)
           : op == Binary::kMul ? x * z
                                : x - z;
  }
};

template <class T>
struct ClipFunction {
  const T* x;
  const T* low;
  const T* high;
  T* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    float value = to_float(x[i]);  // NaN fails both comparisons and stays NaN
    if (low != nullptr && value < to_float(*low)) value = to_float(*low);
    if (high != nullptr && value > to_float(*high)) value = to_float(*high);
    y[i] = from_float<T>(value);
  }
};

template <class T, int N>
struct QuantizeFunction {
  const T* x;
  const T* scale;
  uint8_t* y;
  bool is_int8;

  SD_ORT_DEVICE static int8_t to_int8(float value) {
    const float rounded = rintf(value);
    return static_cast<int8_t>(rounded < -128.f ? -128.f : rounded > 127.f ? 127.f : rounded);
  }
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    struct alignas(N) Elements {
      uint8_t y[N];
    };
    const Vector<T, N> values = reinterpret_cast<const Vector<T, N>*>(x)[i];
    Elements elements;
    const float divisor = to_float(*scale);
    if (is_int8) {
      for (int k = 0; k < N; ++k) elements.y[k] = static_cast<uint8_t>(to_int8(to_float(values.x[k]) / divisor));
    } else if (N == 1) {
      elements.y[0] = float_to_float8(to_float(values.x[0]) / divisor);
    } else {
      for (int k = 0; k + 1 < N; k += 2) {
        const uint16_t pair =
            float_to_float8_pair(to_float(values.x[k]) / divisor, to_float(values.x[k + 1]) / divisor);
        memcpy(elements.y + k, &pair, 2);
      }
    }
    reinterpret_cast<Elements*>(y)[i] = elements;
  }
};

SD_ORT_DEVICE bool has_four_bits(StoredType type) { return type == StoredType::kInt4 || type == StoredType::kUInt4; }

// Element `i` of stored elements.
SD_ORT_DEVICE float stored_element(StoredType type, const uint8_t* from, uint32_t i) {
  if (has_four_bits(type)) {
    const int bits = from[i / 2] >> (i % 2 * 4) & 15;
    return static_cast<float>(type == StoredType::kInt4 && bits >= 8 ? bits - 16 : bits);
  }
  if (type == StoredType::kFloat8) return float8_to_float(from[i]);
  return type == StoredType::kInt8 ? static_cast<float>(static_cast<int8_t>(from[i])) : static_cast<float>(from[i]);
}

// N elements that are adjacent along the last axis, of one outer index.
template <class T, int N>
struct DequantizeFunction {
  StoredType type;
  const uint8_t* x;
  const T* scale;
  const uint8_t* zero_points;
  T* y;
  uint32_t size, inner, block, outer_stride, block_stride, inner_stride;

  SD_ORT_DEVICE void operator()(uint32_t index) const {
    const uint32_t first = index * N, row = first / inner, column = first % inner, outer = row / size;
    Vector<T, N> values;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t at = inner == 1 ? row % size + k : row % size, i = inner == 1 ? 0 : column + k;
      const uint32_t s = outer * outer_stride + at / block * block_stride + i * inner_stride;
      const float zero = zero_points == nullptr ? 0.f : stored_element(type, zero_points, s);
      values.x[k] = from_float<T>((stored_element(type, x, first + k) - zero) * to_float(scale[s]));
    }
    reinterpret_cast<Vector<T, N>*>(y)[index] = values;
  }
};

template <class T>
struct WhereFunction {
  Broadcast shape;
  const bool* condition;
  const T* a;
  const T* b;
  T* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const Offsets at(shape, i);
    y[i] = condition[at.condition] ? a[at.a] : b[at.b];
  }
};

template <class To, class From>
struct Convert {
  SD_ORT_DEVICE static To of(From x) { return static_cast<To>(x); }
};
template <class From>
struct Convert<half_t, From> {
  SD_ORT_DEVICE static half_t of(From x) { return from_float<half_t>(static_cast<float>(x)); }
};
template <class From>
struct Convert<bf16_t, From> {
  SD_ORT_DEVICE static bf16_t of(From x) { return from_float<bf16_t>(static_cast<float>(x)); }
};
template <class From>
struct Convert<bool, From> {
  SD_ORT_DEVICE static bool of(From x) { return x != From{}; }
};

// float16 and bfloat16 as float, other types unchanged.
template <class T>
SD_ORT_DEVICE T widened(T x) {
  return x;
}
SD_ORT_DEVICE float widened(half_t x) { return to_float(x); }
SD_ORT_DEVICE float widened(bf16_t x) { return to_float(x); }

template <class T>
struct CompareFunction {
  Comparison op;
  Broadcast shape;
  const T* a;
  const T* b;
  bool* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const Offsets at(shape, i);
    const auto left = widened(a[at.a]), right = widened(b[at.b]);
    y[i] = op == Comparison::kEqual ? left == right : left > right;
  }
};

template <class From, class To>
struct CastFunction {
  const From* from;
  To* to;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const auto x = widened(from[i]);
    to[i] = Convert<To, typename std::remove_const<decltype(x)>::type>::of(x);
  }
};

// Calls launch(Type<T>()) with the C++ type of an ElementType.
template <class Launch>
const char* with_element_type(ElementType type, Launch launch) {
  switch (type) {
    case ElementType::kFloat32:
      return launch(Type<float>());
    case ElementType::kFloat16:
      return launch(Type<half_t>());
    case ElementType::kBFloat16:
      return launch(Type<bf16_t>());
    case ElementType::kFloat64:
      return launch(Type<double>());
    case ElementType::kInt32:
      return launch(Type<int32_t>());
    case ElementType::kInt64:
      return launch(Type<kernel_int64_t>());
    case ElementType::kUInt8:
      return launch(Type<uint8_t>());
    default:
      return launch(Type<bool>());
  }
}

int64_t elements(const Broadcast& shape) {
  int64_t count = 1;
  for (int axis = 0; axis < shape.axes; ++axis) count *= shape.sizes[axis];
  return count;
}

// Whether both inputs of a binary operator have the shape of its output: its axes are merged.
bool is_dense(const Broadcast& shape) {
  return shape.axes == 0 || (shape.axes == 1 && shape.a_strides[0] == 1 && shape.b_strides[0] == 1);
}

}  // namespace

const char* unary(Unary op, DType dtype, const void* x, void* y, int64_t count, float alpha, void* stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto vector) {
      constexpr int kCount = decltype(vector)::kCount;
      const UnaryFunction<T, kCount> function{op, static_cast<const T*>(x), static_cast<T*>(y), alpha};
      return for_each(count / kCount, function, stream);
    };
    return in_vectors<T>(count, run, x, y);
  });
}

const char* binary(Binary op, DType dtype, const Broadcast& shape, const void* a, const void* b, void* y,
                   void* stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const BinaryFunction<T> function{op, shape, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y)};
    const int64_t count = elements(shape);
    if (!is_dense(shape)) return for_each(count, function, stream);
    const auto run = [&](auto vector) {
      constexpr int kCount = decltype(vector)::kCount;
      return for_each(count / kCount, DenseBinaryFunction<T, kCount>{op, function.a, function.b, function.y}, stream);
    };
    return in_vectors<T>(count, run, a, b, y);
  });
}

const char* binary_integers(Binary op, ElementType type, const Broadcast& shape, const void* a, const void* b, void* y,
                            void* stream) {
  const auto launch = [&](auto sample) {
    using T = decltype(sample);
    const IntegerFunction<T> function{op, shape, static_cast<const T*>(a), static_cast<const T*>(b),
                                      static_cast<T*>(y)};
    return for_each(elements(shape), function, stream);
  };
  return type == ElementType::kInt32 ? launch(int32_t{}) : launch(kernel_int64_t{});
}

const char* compare(Comparison op, ElementType type, const Broadcast& shape, const void* a, const void* b, void* y,
                    void* stream) {
  return with_element_type(type, [&](auto element) {
    using Element = typename decltype(element)::type;
    using T = std::conditional_t<std::is_same_v<Element, bool>, uint8_t, Element>;
    const CompareFunction<T> function{op, shape, static_cast<const T*>(a), static_cast<const T*>(b),
                                      static_cast<bool*>(y)};
    return for_each(elements(shape), function, stream);
  });
}

const char* clip(DType dtype, const void* x, const void* low, const void* high, void* y, int64_t count, void* stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const ClipFunction<T> function{static_cast<const T*>(x), static_cast<const T*>(low), static_cast<const T*>(high),
                                   static_cast<T*>(y)};
    return for_each(count, function, stream);
  });
}

const char* quantize(DType dtype, const void* x, const void* scale, DType eight_bits, void* y, int64_t count,
                     void* stream) {
  const auto launch = [&](auto sample) {
    using T = decltype(sample);
    const auto run = [&](auto vector) {
      constexpr int kCount = decltype(vector)::kCount;
      const QuantizeFunction<T, kCount> function{static_cast<const T*>(x), static_cast<const T*>(scale),
                                                 static_cast<uint8_t*>(y), eight_bits == DType::kInt8};
      return for_each(count / kCount, function, stream);
    };
    const bool wide = count % 8 == 0 && are_aligned<16>(x) && are_aligned<8>(y);
    return wide ? run(ElementsAtOnce<8>()) : run(ElementsAtOnce<1>());
  };
  return dtype == DType::kFloat32 ? launch(float{}) : dtype == DType::kFloat16 ? launch(half_t{}) : launch(bf16_t{});
}

const char* dequantize(DType dtype, const DequantizeCall& call, void* stream) {
  const auto launch = [&](auto sample) {
    using T = decltype(sample);
    const auto narrow = [](int64_t value) { return static_cast<uint32_t>(value); };
    const auto run = [&](auto vector) {
      constexpr int kCount = decltype(vector)::kCount;
      const DequantizeFunction<T, kCount> function{call.type,
                                                   static_cast<const uint8_t*>(call.x),
                                                   static_cast<const T*>(call.scale),
                                                   static_cast<const uint8_t*>(call.zero_points),
                                                   static_cast<T*>(call.y),
                                                   narrow(call.size),
                                                   narrow(call.inner),
                                                   narrow(call.block),
                                                   narrow(call.outer_stride),
                                                   narrow(call.block_stride),
                                                   narrow(call.inner_stride)};
      return for_each(call.outer * call.size * call.inner / kCount, function, stream);
    };
    const int64_t columns = call.inner == 1 ? call.size : call.inner;  // of the last axis
    const bool wide = columns % 8 == 0 && are_aligned<16>(call.y);
    return wide ? run(ElementsAtOnce<8>()) : run(ElementsAtOnce<1>());
  };
  return dtype == DType::kFloat32 ? launch(float{}) : dtype == DType::kFloat16 ? launch(half_t{}) : launch(bf16_t{});
}

const char* where(const Broadcast& shape, const void* condition, const void* a, const void* b, void* y,
                  int element_bytes, void* stream) {
  const auto launch = [&](auto sample) {
    using T = decltype(sample);
    const WhereFunction<T> function{shape, static_cast<const bool*>(condition), static_cast<const T*>(a),
                                    static_cast<const T*>(b), static_cast<T*>(y)};
    return for_each(elements(shape), function, stream);
  };
  switch (element_bytes) {
    case 2:
      return launch(uint16_t{});
    case 4:
      return launch(uint32_t{});
    case 8:
      return launch(kernel_uint64_t{});
    default:
      return launch(uint8_t{});
  }
}

const char* cast(ElementType from_type, const void* from, ElementType to_type, void* to, int64_t count, void* stream) {
  return with_element_type(from_type, [&](auto source) {
    using From = typename decltype(source)::type;
    return with_element_type(to_type, [&](auto target) {
      using To = typename decltype(target)::type;
      return for_each(count, CastFunction<From, To>{static_cast<const From*>(from), static_cast<To*>(to)}, stream);
    });
  });
}

}  // namespace sd_ort
