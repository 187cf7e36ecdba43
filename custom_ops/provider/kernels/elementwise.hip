// Functions of single elements, computed in float32, and conversions between element types.
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

template <class T>
struct UnaryFunction {
  Unary op;
  const T* x;
  T* y;
  float alpha;
  SD_ORT_DEVICE void operator()(uint32_t i) const { y[i] = from_float<T>(apply(op, to_float(x[i]), alpha)); }
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

template <class T>
SD_ORT_DEVICE T number(T x) {
  return x;
}
SD_ORT_DEVICE float number(half_t x) { return to_float(x); }
SD_ORT_DEVICE float number(bf16_t x) { return to_float(x); }

template <class From, class To>
struct CastFunction {
  const From* from;
  To* to;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const auto x = number(from[i]);
    to[i] = Convert<To, typename std::remove_const<decltype(x)>::type>::of(x);
  }
};

template <class From, class To>
const char* cast_elements(const void* from, void* to, int64_t count, void* stream) {
  return for_each(count, CastFunction<From, To>{static_cast<const From*>(from), static_cast<To*>(to)}, stream);
}

template <class From>
const char* cast_from(const void* from, Number to_type, void* to, int64_t count, void* stream) {
  switch (to_type) {
    case Number::kFloat32:
      return cast_elements<From, float>(from, to, count, stream);
    case Number::kFloat16:
      return cast_elements<From, half_t>(from, to, count, stream);
    case Number::kBFloat16:
      return cast_elements<From, bf16_t>(from, to, count, stream);
    case Number::kFloat64:
      return cast_elements<From, double>(from, to, count, stream);
    case Number::kInt32:
      return cast_elements<From, int32_t>(from, to, count, stream);
    case Number::kInt64:
      return cast_elements<From, int64_t>(from, to, count, stream);
    default:
      return cast_elements<From, bool>(from, to, count, stream);
  }
}

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

const char* unary(Unary op, DType dtype, const void* x, void* y, int64_t count, float alpha, void* stream) {
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(count, UnaryFunction<T>{op, static_cast<const T*>(x), static_cast<T*>(y), alpha}, stream);
  });
}

const char* binary(Binary op, DType dtype, const Broadcast& shape, const void* a, const void* b, void* y,
                   void* stream) {
  int64_t count = 1;
  for (int axis = 0; axis < shape.axes; ++axis) count *= shape.sizes[axis];
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(
        count, BinaryFunction<T>{op, shape, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y)},
        stream);
  });
}

namespace {

template <class T>
const char* where_of(const Broadcast& shape, int64_t count, const void* condition, const void* a, const void* b,
                     void* y, void* stream) {
  return for_each(count,
                  WhereFunction<T>{shape, static_cast<const bool*>(condition), static_cast<const T*>(a),
                                   static_cast<const T*>(b), static_cast<T*>(y)},
                  stream);
}

}  // namespace

const char* where(const Broadcast& shape, const void* condition, const void* a, const void* b, void* y,
                  int element_bytes, void* stream) {
  int64_t count = 1;
  for (int axis = 0; axis < shape.axes; ++axis) count *= shape.sizes[axis];
  switch (element_bytes) {
    case 2:
      return where_of<uint16_t>(shape, count, condition, a, b, y, stream);
    case 4:
      return where_of<uint32_t>(shape, count, condition, a, b, y, stream);
    case 8:
      return where_of<uint64_t>(shape, count, condition, a, b, y, stream);
    default:
      return where_of<uint8_t>(shape, count, condition, a, b, y, stream);
  }
}

const char* cast(Number from_type, const void* from, Number to_type, void* to, int64_t count, void* stream) {
  switch (from_type) {
    case Number::kFloat32:
      return cast_from<float>(from, to_type, to, count, stream);
    case Number::kFloat16:
      return cast_from<half_t>(from, to_type, to, count, stream);
    case Number::kBFloat16:
      return cast_from<bf16_t>(from, to_type, to, count, stream);
    case Number::kFloat64:
      return cast_from<double>(from, to_type, to, count, stream);
    case Number::kInt32:
      return cast_from<int32_t>(from, to_type, to, count, stream);
    case Number::kInt64:
      return cast_from<int64_t>(from, to_type, to, count, stream);
    default:
      return cast_from<bool>(from, to_type, to, count, stream);
  }
}

}  // namespace sd_ort
