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
    case Unary::kRound:
      return rintf(x);  // halves to the even number
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
    float value = to_float(x[i]);  // comparisons that NaN fails: it stays
    if (low != nullptr && value < to_float(*low)) value = to_float(*low);
    if (high != nullptr && value > to_float(*high)) value = to_float(*high);
    y[i] = from_float<T>(value);
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

template <class T>
struct EqualFunction {
  Broadcast shape;
  const T* a;
  const T* b;
  bool* y;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const Offsets at(shape, i);
    y[i] = number(a[at.a]) == number(b[at.b]);
  }
};

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
    case Number::kUInt8:
      return cast_elements<From, uint8_t>(from, to, count, stream);
    default:
      return cast_elements<From, bool>(from, to, count, stream);
  }
}

int64_t elements(const Broadcast& shape) {
  int64_t count = 1;
  for (int axis = 0; axis < shape.axes; ++axis) count *= shape.sizes[axis];
  return count;
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
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(
        elements(shape),
        BinaryFunction<T>{op, shape, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y)}, stream);
  });
}

namespace {

template <class T>
const char* integers_of(Binary op, const Broadcast& shape, const void* a, const void* b, void* y, void* stream) {
  return for_each(elements(shape),
                  IntegerFunction<T>{op, shape, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y)},
                  stream);
}

template <class T>
const char* equal_of(const Broadcast& shape, const void* a, const void* b, void* y, void* stream) {
  return for_each(elements(shape),
                  EqualFunction<T>{shape, static_cast<const T*>(a), static_cast<const T*>(b), static_cast<bool*>(y)},
                  stream);
}

}  // namespace

const char* binary_integers(Binary op, Number type, const Broadcast& shape, const void* a, const void* b, void* y,
                            void* stream) {
  return type == Number::kInt32 ? integers_of<int32_t>(op, shape, a, b, y, stream)
                                : integers_of<int64_t>(op, shape, a, b, y, stream);
}

const char* equal(Number type, const Broadcast& shape, const void* a, const void* b, void* y, void* stream) {
  switch (type) {
    case Number::kFloat32:
      return equal_of<float>(shape, a, b, y, stream);
    case Number::kFloat16:
      return equal_of<half_t>(shape, a, b, y, stream);
    case Number::kBFloat16:
      return equal_of<bf16_t>(shape, a, b, y, stream);
    case Number::kFloat64:
      return equal_of<double>(shape, a, b, y, stream);
    case Number::kInt32:
      return equal_of<int32_t>(shape, a, b, y, stream);
    case Number::kInt64:
      return equal_of<int64_t>(shape, a, b, y, stream);
    default:
      return equal_of<uint8_t>(shape, a, b, y, stream);
  }
}

const char* clip(DType dtype, const void* x, const void* low, const void* high, void* y, int64_t count, void* stream) {
  return by_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    return for_each(count,
                    ClipFunction<T>{static_cast<const T*>(x), static_cast<const T*>(low), static_cast<const T*>(high),
                                    static_cast<T*>(y)},
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
  const int64_t count = elements(shape);
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
    case Number::kUInt8:
      return cast_from<uint8_t>(from, to_type, to, count, stream);
    default:
      return cast_from<bool>(from, to_type, to, count, stream);
  }
}

}  // namespace sd_ort
