// Element types and products of matrices on the host, for the simulated ROCm libraries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace simulated {

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64, kInt32, kInt8, kFloat8, kFloat8Fnuz };  // e4m3

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64",
                                    "int32",   "int8",    "float8",   "float8_fnuz"};
  return kNames[static_cast<int>(dtype)];
}

inline size_t bytes_of(DType dtype) {
  constexpr size_t kBytes[] = {4, 2, 2, 8, 4, 1, 1, 1};
  return kBytes[static_cast<int>(dtype)];
}

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float float16_to_float(uint16_t half) {
  // The exponent's bias differs by 112. A product with 2^112 makes subnormal numbers right, too.
  float magnitude = bit_cast<float>(static_cast<uint32_t>(half & 0x7fff) << 13) * 0x1p112f;
  if (magnitude >= 65536.f) magnitude = bit_cast<float>(bit_cast<uint32_t>(magnitude) | 0x7f800000u);  // inf, NaN
  return bit_cast<float>(bit_cast<uint32_t>(magnitude) | static_cast<uint32_t>(half & 0x8000) << 16);
}

// Rounds to nearest even, as all conversions here.
inline uint16_t float_to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // 65520 and above
  } else if (magnitude < 0x38800000) {
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);  // subnormal
  } else {
    half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

inline float bfloat16_to_float(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN. `fnuz`: with bias 8, and the only NaN is
// 0x80.
inline float float8_to_float(uint8_t bits, bool fnuz) {
  if (fnuz ? bits == 0x80 : (bits & 0x7f) == 0x7f) return bit_cast<float>(0x7fc00000u);
  const int exponent = bits >> 3 & 15, mantissa = bits & 7, bias = fnuz ? 8 : 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -2 - bias)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 3 - bias);
  return bits & 0x80 ? -magnitude : magnitude;
}

inline float load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat64:
      return static_cast<float>(static_cast<const double*>(data)[index]);
    case DType::kInt32:
      return static_cast<float>(static_cast<const int32_t*>(data)[index]);
    case DType::kInt8:
      return static_cast<const int8_t*>(data)[index];
    case DType::kFloat8:
    case DType::kFloat8Fnuz:
      return float8_to_float(static_cast<const uint8_t*>(data)[index], dtype == DType::kFloat8Fnuz);
  }
  return 0;
}

inline void store(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = value;
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_float16(value);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_bfloat16(value);
      break;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::kInt32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
      break;
    case DType::kInt8:
      static_cast<int8_t*>(data)[index] = static_cast<int8_t>(value);
      break;
    default:
      break;  // no library writes float8
  }
}

// Calls work(begin, end) for parts of [0, count), on two threads if there are many operations.
template <class Work>
void in_parallel(int64_t count, double operations, const Work& work) {
  if (operations < 1e6 || count < 2) return work(int64_t{0}, count);
  const int64_t half = (count + 1) / 2;
  std::thread other([&] { work(half, count); });
  work(int64_t{0}, half);
  other.join();
}

// c (rows, columns) = a (rows, inner) b (inner, columns), row-major and contiguous.
inline void multiply(const float* a, const float* b, float* c, int64_t rows, int64_t columns, int64_t inner) {
  using Vector = float __attribute__((vector_size(32), aligned(4), may_alias));
  constexpr int64_t kRows = 6, kWidth = 16, kInner = 512;  // 12 vectors of sums, and a panel of b in the L1 cache
  const auto multiply_panels = [=](int64_t first, int64_t last) {
    std::vector<float> panel(kInner * kWidth);
    for (int64_t j = first * kWidth; j < std::min(columns, last * kWidth); j += kWidth) {
      const int64_t width = std::min(kWidth, columns - j);
      for (int64_t p0 = 0; p0 < inner || p0 == 0; p0 += kInner) {
        const int64_t depth = std::min(kInner, inner - p0);
        for (int64_t p = 0; p < depth; ++p) {
          for (int64_t x = 0; x < kWidth; ++x) panel[p * kWidth + x] = x < width ? b[(p0 + p) * columns + j + x] : 0.f;
        }
        for (int64_t i = 0; i < rows; i += kRows) {
          const float* row[kRows];
          for (int64_t q = 0; q < kRows; ++q) row[q] = a + std::min(i + q, rows - 1) * inner + p0;
          Vector sums[kRows][2] = {};
          for (int64_t p = 0; p < depth; ++p) {
            const Vector left = *reinterpret_cast<const Vector*>(&panel[p * kWidth]);
            const Vector right = *reinterpret_cast<const Vector*>(&panel[p * kWidth + 8]);
            for (int64_t q = 0; q < kRows; ++q) {
              sums[q][0] += row[q][p] * left;
              sums[q][1] += row[q][p] * right;
            }
          }
          for (int64_t q = 0; q < std::min(kRows, rows - i); ++q) {
            float* to = c + (i + q) * columns + j;
            for (int64_t x = 0; x < width; ++x) to[x] = (p0 == 0 ? 0.f : to[x]) + sums[q][x / 8][x % 8];
          }
        }
      }
    }
  };
  in_parallel((columns + kWidth - 1) / kWidth, static_cast<double>(rows) * columns * inner, multiply_panels);
}

// A matrix (rows, columns) in memory: element (i, j) at i * row_stride + j * column_stride.
struct MatrixView {
  const void* data;
  DType dtype;
  int64_t row_stride, column_stride;

  std::vector<float> read(int64_t rows, int64_t columns, int64_t offset) const {
    std::vector<float> values(rows * columns);
    in_parallel(rows, static_cast<double>(rows) * columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          values[i * columns + j] = load(data, dtype, offset + i * row_stride + j * column_stride);
        }
      }
    });
    return values;
  }
};

inline float gelu_by_tanh(float x) { return 0.5f * x * (1.f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

// Products of column-major matrices, as the BLAS libraries have them: D = alpha op(A) op(B) + beta C + bias, for each
// matrix of a batch. op(A) is (m, k), op(B) (k, n); bias, (m) or null, is added to each column. `gelu`: D is GELU of
// that. `a_scale`, `b_scale`: null or a number in device memory that A or B is multiplied by.
struct Gemm {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  float alpha, beta;
  const void* a;
  DType a_dtype;
  int64_t lda, a_stride;
  const void* b;
  DType b_dtype;
  int64_t ldb, b_stride;
  const void* c;
  int64_t ldc, c_stride;
  void* d;
  DType d_dtype;  // of C, too
  int64_t ldd, d_stride;
  int64_t batch;
  const void* bias = nullptr;
  DType bias_dtype = DType::kFloat32;
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  bool gelu = false;

  void run() const {
    // Row-major, the transposed product: (n, m) = op(B)^T op(A)^T.
    const MatrixView left{b, b_dtype, transpose_b ? 1 : ldb, transpose_b ? ldb : 1};
    const MatrixView right{a, a_dtype, transpose_a ? 1 : lda, transpose_a ? lda : 1};
    std::vector<float> product(n * m);
    const float factor = alpha * (a_scale == nullptr ? 1.f : *a_scale) * (b_scale == nullptr ? 1.f : *b_scale);
    for (int64_t q = 0; q < batch; ++q) {
      multiply(left.read(n, k, q * b_stride).data(), right.read(k, m, q * a_stride).data(), product.data(), n, m, k);
      in_parallel(n, static_cast<double>(n) * m, [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          for (int64_t i = 0; i < m; ++i) {
            float value = factor * product[j * m + i];
            if (beta != 0) value += beta * load(c, d_dtype, q * c_stride + j * ldc + i);
            if (bias != nullptr) value += load(bias, bias_dtype, i);
            if (gelu) value = gelu_by_tanh(value);
            store(d, d_dtype, q * d_stride + j * ldd + i, value);
          }
        }
      });
    }
  }
};

}  // namespace simulated
