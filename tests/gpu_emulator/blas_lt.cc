// What common/blas_lt.h calls of cuBLASLt, or with SD_ORT_HIPBLASLT of hipBLASLt, on the host: two algorithms, the
// same plain loops. Numbers of attributes and types are written here from the vendors' headers' documentation, and so
// are the layouts of what the caller allocates. Every handle is checked: an argument that the real library would refuse
// gives an error here, and so do an algorithm that was not proposed, with another workspace than it asked for, and in
// hipBLASLt's case a handle that multiplies in two streams and a question for more than 8 algorithms.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/float8.h"
#include "common/gpu.h"  // half_t, bf16_t

#if defined(SD_ORT_HIPBLASLT)
#define NAME(name) hipblasLt##name
constexpr int kOpN = 111, kOpT = 112, kCompute32F = 2;
enum { kTransA = 0, kTransB = 1, kEpilogue = 2, kBias = 3, kBiasType = 4, kScaleA = 5, kScaleD = 8, kFastSums = -1 };
constexpr int kFloat8 = 1000;  // HIP_R_8F_E4M3_FNUZ
enum { kBatchCount = 0, kBatchStride = 1 };
constexpr int kMostWanted = 8;
constexpr bool kHandlePerStream = true;
#else
#define NAME(name) cublasLt##name
constexpr int kOpN = 0, kOpT = 1, kCompute32F = 68;
enum { kTransA = 3, kTransB = 4, kEpilogue = 7, kBias = 8, kScaleA = 17, kScaleD = 20, kFastSums = 25, kBiasType = 26 };
constexpr int kFloat8 = 28;  // CUDA_R_8F_E4M3
enum { kBatchCount = 5, kBatchStride = 6 };
constexpr int kMostWanted = 16;
constexpr bool kHandlePerStream = false;
#endif
constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14, kEpilogueBias = 4, kEpilogueGelu = 32;
constexpr int kInvalid = 7;

namespace {

struct Description {
  int transpose_a = kOpN;
  int epilogue = 1;
  const void* bias = nullptr;
  const float* scale_a = nullptr;
  const float* scale_d = nullptr;
  int bias_type = -1;  // that of D
};

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
  int32_t batch = 1;
  int64_t batch_stride = 0;
};

#if defined(SD_ORT_HIPBLASLT)
struct Algorithm {  // hipblasLtMatmulAlgo_t
  uint8_t data[16];
  size_t max_workspace_bytes;
};
#else
struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
#endif

struct Heuristic {  // hipblasLtMatmulHeuristicResult_t, cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
#if defined(SD_ORT_HIPBLASLT)
static_assert(sizeof(Heuristic) == 56);
#else
static_assert(sizeof(Heuristic) == 96);
#endif

constexpr char kMark[] = "proposed";

Algorithm algorithm(int number) {
  Algorithm made{};
  std::memcpy(made.data, kMark, sizeof(kMark));
  reinterpret_cast<uint8_t*>(made.data)[sizeof(kMark)] = static_cast<uint8_t>(number);
  return made;
}

// Of each algorithm its own.
size_t workspace_bytes_of(int number) { return 100 + 4 * number; }

struct Handle {
  bool multiplied = false;
  void* stream = nullptr;
};

float load(const void* data, int type, int64_t at) {
  if (type == kFloat32) return static_cast<const float*>(data)[at];
  if (type == kFloat16) return sd_ort::to_float(static_cast<const sd_ort::half_t*>(data)[at]);
  if (type == kFloat8) {  // FNUZ: half of the value, and no negative zero
    const uint8_t bits = static_cast<const uint8_t*>(data)[at];
    return kFloat8 == 28 ? sd_ort::float8_to_float(bits) : bits == 0x80 ? NAN : sd_ort::float8_to_float(bits) / 2;
  }
  return sd_ort::to_float(static_cast<const sd_ort::bf16_t*>(data)[at]);
}

void store(void* data, int type, int64_t at, float value) {
  if (type == kFloat32) static_cast<float*>(data)[at] = value;
  if (type == kFloat16) static_cast<sd_ort::half_t*>(data)[at] = sd_ort::from_float<sd_ort::half_t>(value);
  if (type == kBFloat16) static_cast<sd_ort::bf16_t*>(data)[at] = sd_ort::from_float<sd_ort::bf16_t>(value);
  if (type == kFloat8) static_cast<uint8_t*>(data)[at] = sd_ort::float_to_float8(value);
}

// Whether D = op(A) B fits together.
bool fits(const Description& d, const Layout& a, const Layout& b, const Layout& c, const Layout& to) {
  const bool transposed = d.transpose_a == kOpT;
  const uint64_t rows = transposed ? a.columns : a.rows, depth = transposed ? a.rows : a.columns;
  for (const Layout* layout : {&a, &b, &c, &to}) {
    if (layout->stride < static_cast<int64_t>(layout->rows)) return false;
  }
  // D in float8, of OCP: C and the bias have one type of 16 bits.
  const bool float8_d = to.type == kFloat8 && kFloat8 == 28 && (c.type == kFloat16 || c.type == kBFloat16) &&
                        ((d.epilogue & kEpilogueBias) == 0 || d.bias_type == c.type);
  const bool one_batch = a.batch == b.batch && b.batch == c.batch && c.batch == to.batch && a.batch > 0;
  return one_batch && a.type == b.type && depth == b.rows && rows == to.rows && b.columns == to.columns &&
         c.rows == to.rows && c.columns == to.columns && (c.type == to.type || float8_d) &&
         (to.type != kFloat8 || float8_d) &&
         (to.type == a.type || to.type == kFloat32 || (a.type == kFloat8 && transposed));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int NAME(Create)(void** handle) {
  *handle = new Handle;
  return 0;
}

EXPORT int NAME(MatmulDescCreate)(void** description, int compute, int scale) {
  *description = new Description;
  return compute == kCompute32F && scale == kFloat32 ? 0 : kInvalid;
}

EXPORT int NAME(MatmulDescSetAttribute)(void* description, int attribute, const void* value, size_t bytes) {
  auto& d = *static_cast<Description*>(description);
  const auto set = [&](auto& field) {
    return bytes == sizeof(field) ? std::memcpy(&field, value, bytes), 0 : kInvalid;
  };
  if (attribute == kTransA && bytes == sizeof(int)) {
    std::memcpy(&d.transpose_a, value, bytes);
    return d.transpose_a == kOpN || d.transpose_a == kOpT ? 0 : kInvalid;
  }
  if (attribute == kEpilogue && bytes == sizeof(int)) {
    std::memcpy(&d.epilogue, value, bytes);
    return (d.epilogue & ~(kEpilogueBias | kEpilogueGelu)) == 0 ? 0 : kInvalid;
  }
  if (attribute == kBias) return set(d.bias);
  if (attribute == kScaleA) return set(d.scale_a);
  if (attribute == kScaleD) return set(d.scale_d);
  if (attribute == kBiasType) return set(d.bias_type);
  if (attribute == kFastSums && bytes == 1) return 0;
  return kInvalid;
}

EXPORT int NAME(MatrixLayoutCreate)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *layout = new Layout{type, rows, columns, stride};
  return type == kFloat32 || type == kFloat16 || type == kBFloat16 || type == kFloat8 ? 0 : kInvalid;
}

EXPORT int NAME(MatrixLayoutSetAttribute)(void* layout, int attribute, const void* value, size_t bytes) {
  auto& l = *static_cast<Layout*>(layout);
  if (attribute == kBatchCount && bytes == sizeof(l.batch)) {
    std::memcpy(&l.batch, value, bytes);
    return 0;
  }
  if (attribute == kBatchStride && bytes == sizeof(l.batch_stride)) {
    std::memcpy(&l.batch_stride, value, bytes);
    return 0;
  }
  return kInvalid;
}

EXPORT int NAME(MatmulPreferenceCreate)(void** preference) {
  *preference = new int;
  return 0;
}

EXPORT int NAME(MatmulPreferenceSetAttribute)(void*, int, const void*, size_t) { return 0; }

EXPORT int NAME(MatmulAlgoGetHeuristic)(void*, void* description, void* a, void* b, void* c, void* to, void*,
                                        int wanted, Heuristic* proposed, int* count) {
  *count = 0;
  if (wanted < 1 || wanted > kMostWanted ||
      !fits(*static_cast<Description*>(description), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
            *static_cast<Layout*>(c), *static_cast<Layout*>(to))) {
    return kInvalid;
  }
  for (*count = 0; *count < wanted && *count < 2; ++*count) {
    proposed[*count] = {algorithm(*count), workspace_bytes_of(*count), 0, 1.f, {}};
  }
  return 0;
}

EXPORT int NAME(Matmul)(void* handle, void* description, const void* alpha, const void* a, void* a_layout,
                        const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* to,
                        void* to_layout, const void* proposed, void* workspace, size_t workspace_bytes, void* stream) {
  const auto& d = *static_cast<Description*>(description);
  const auto &la = *static_cast<Layout*>(a_layout), &lb = *static_cast<Layout*>(b_layout);
  const auto &lc = *static_cast<Layout*>(c_layout), &ld = *static_cast<Layout*>(to_layout);
  if (!fits(d, la, lb, lc, ld)) return kInvalid;
  if (c == to && lc.type != ld.type) return kInvalid;
  const int number = static_cast<const uint8_t*>(proposed)[sizeof(kMark)];
  const Algorithm wanted = algorithm(number);
  if (std::memcmp(proposed, &wanted, sizeof(wanted)) != 0) return kInvalid;
  if (workspace_bytes != workspace_bytes_of(number)) return kInvalid;
  auto& h = *static_cast<Handle*>(handle);
  if (kHandlePerStream && h.multiplied && h.stream != stream) return kInvalid;
  h = {true, stream};
  std::memset(workspace, 0xff, workspace_bytes);  // it is the algorithm's
  float scale, rest;
  std::memcpy(&scale, alpha, sizeof(scale));
  if (d.scale_a != nullptr) scale *= *d.scale_a;
  std::memcpy(&rest, beta, sizeof(rest));
  for (int32_t i = 0; i < ld.batch; ++i) {
    for (uint64_t column = 0; column < ld.columns; ++column) {
      for (uint64_t row = 0; row < ld.rows; ++row) {
        double sum = 0;
        for (uint64_t k = 0; k < lb.rows; ++k) {
          const int64_t at = i * la.batch_stride + (d.transpose_a == kOpT ? row * la.stride + k : k * la.stride + row);
          sum += double(load(a, la.type, at)) * load(b, lb.type, i * lb.batch_stride + column * lb.stride + k);
        }
        float value = static_cast<float>(scale * sum);
        if (rest != 0) value += rest * load(c, lc.type, i * lc.batch_stride + column * lc.stride + row);
        if (d.epilogue & kEpilogueBias) value += load(d.bias, d.bias_type < 0 ? ld.type : d.bias_type, row);
        if (d.epilogue & kEpilogueGelu) {
          value = 0.5f * value * (1.f + std::tanh(0.79788456f * (value + 0.044715f * value * value * value)));
        }
        if (d.scale_d != nullptr) value *= *d.scale_d;
        store(to, ld.type, i * ld.batch_stride + column * ld.stride + row, value);
      }
    }
  }
  return 0;
}
