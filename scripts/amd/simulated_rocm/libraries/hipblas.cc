// Simulated libhipblas.so.3, with the functions of rocBLAS that onnxruntime-rocm 1.22.2 takes by way of it. Built from
// the real headers of hipBLAS 3.
#include <hipblas/hipblas.h>

#define ROCBLAS_BETA_FEATURES_API
#include <rocblas/rocblas.h>

#include <iterator>

#include "library.h"

namespace {

using simulated::DType;
using simulated::fail;
using simulated::Gemm;

struct Handle {
  hipStream_t stream = nullptr;
};

hipStream_t stream_of(const void* handle) {
  if (handle == nullptr) fail("hipBLAS: the handle is null");
  return static_cast<const Handle*>(handle)->stream;
}

DType dtype_of(hipDataType type, const char* function) {
  switch (type) {
    case HIP_R_32F:
      return DType::kFloat32;
    case HIP_R_16F:
      return DType::kFloat16;
    case HIP_R_16BF:
      return DType::kBFloat16;
    case HIP_R_64F:
      return DType::kFloat64;
    default:
      fail("%s: type %d is not simulated", function, type);
  }
}

DType dtype_of(rocblas_datatype type, const char* function) {
  switch (type) {
    case rocblas_datatype_f32_r:
      return DType::kFloat32;
    case rocblas_datatype_f16_r:
      return DType::kFloat16;
    case rocblas_datatype_bf16_r:
      return DType::kBFloat16;
    case rocblas_datatype_f64_r:
      return DType::kFloat64;
    default:
      fail("%s: type %d is not simulated", function, type);
  }
}

// The type of alpha and beta.
DType dtype_of(hipblasComputeType_t compute, const char* function) {
  switch (compute) {
    case HIPBLAS_COMPUTE_16F:
    case HIPBLAS_COMPUTE_16F_PEDANTIC:
      return DType::kFloat16;
    case HIPBLAS_COMPUTE_64F:
    case HIPBLAS_COMPUTE_64F_PEDANTIC:
      return DType::kFloat64;
    case HIPBLAS_COMPUTE_32F:
    case HIPBLAS_COMPUTE_32F_PEDANTIC:
    case HIPBLAS_COMPUTE_32F_FAST_16F:
    case HIPBLAS_COMPUTE_32F_FAST_16BF:
    case HIPBLAS_COMPUTE_32F_FAST_TF32:
      return DType::kFloat32;
    default:
      fail("%s: compute type %d is not simulated", function, compute);
  }
}

bool is_transposed(int operation, const char* function) {
  static_assert(int(HIPBLAS_OP_N) == int(rocblas_operation_none) &&
                int(HIPBLAS_OP_T) == int(rocblas_operation_transpose));
  if (operation < HIPBLAS_OP_N || operation > HIPBLAS_OP_C) fail("%s: operation %d", function, operation);
  return operation != HIPBLAS_OP_N;
}

// Elements from the first to behind the last of a column-major matrix, or of a batch of them.
size_t extent(int64_t rows, int64_t columns, int64_t leading, int64_t stride, int64_t batch) {
  return (batch - 1) * stride + (columns - 1) * leading + rows;
}

// A matrix, or a batch of them, as callers describe it.
template <class Type>
struct Matrix {
  const void* data;
  Type type;
  int64_t leading, stride;
};

template <class Operation, class Type, class Compute>
Gemm strided_gemm(const char* function, Operation transpose_a, Operation transpose_b, int m, int n, int k,
                  const void* alpha, Matrix<Type> a, Matrix<Type> b, const void* beta, Matrix<Type> c, Matrix<Type> d,
                  int batch, Compute compute) {
  const DType scalar = dtype_of(compute, function), d_dtype = dtype_of(d.type, function);
  if (dtype_of(c.type, function) != d_dtype) fail("%s: C and D of two types are not simulated", function);
  return {m,
          n,
          k,
          is_transposed(transpose_a, function),
          is_transposed(transpose_b, function),
          simulated::load(alpha, scalar, 0),
          simulated::load(beta, scalar, 0),
          a.data,
          dtype_of(a.type, function),
          a.leading,
          a.stride,
          b.data,
          dtype_of(b.type, function),
          b.leading,
          b.stride,
          c.data,
          c.leading,
          c.stride,
          const_cast<void*>(d.data),
          d_dtype,
          d.leading,
          d.stride,
          batch};
}

// False if a size or a leading dimension is invalid.
bool run(const void* handle, const char* function, const Gemm& gemm) {
  using simulated::bytes_of;
  using simulated::check_memory;
  simulated_hip_count(function);
  const hipStream_t stream = stream_of(handle);
  if (gemm.m < 0 || gemm.n < 0 || gemm.k < 0 || gemm.batch < 0) return false;
  if (gemm.m == 0 || gemm.n == 0 || gemm.batch == 0) return true;
  const int64_t a_rows = gemm.transpose_a ? gemm.k : gemm.m, a_columns = gemm.transpose_a ? gemm.m : gemm.k;
  const int64_t b_rows = gemm.transpose_b ? gemm.n : gemm.k, b_columns = gemm.transpose_b ? gemm.k : gemm.n;
  if (gemm.lda < a_rows || gemm.ldb < b_rows || gemm.ldc < gemm.m || gemm.ldd < gemm.m) return false;
  if (gemm.k > 0) {
    const size_t a = extent(a_rows, a_columns, gemm.lda, gemm.a_stride, gemm.batch) * bytes_of(gemm.a_dtype);
    const size_t b = extent(b_rows, b_columns, gemm.ldb, gemm.b_stride, gemm.batch) * bytes_of(gemm.b_dtype);
    check_memory(function, "A", gemm.a, a, bytes_of(gemm.a_dtype));
    check_memory(function, "B", gemm.b, b, bytes_of(gemm.b_dtype));
  }
  const size_t d = extent(gemm.m, gemm.n, gemm.ldd, gemm.d_stride, gemm.batch) * bytes_of(gemm.d_dtype);
  check_memory(function, "D", gemm.d, d, bytes_of(gemm.d_dtype));
  if (gemm.beta != 0) {
    const size_t c = extent(gemm.m, gemm.n, gemm.ldc, gemm.c_stride, gemm.batch) * bytes_of(gemm.d_dtype);
    check_memory(function, "C", gemm.c, c, bytes_of(gemm.d_dtype));
  }
  return simulated::submit(stream, [gemm] { gemm.run(); }) == hipSuccess;
}

hipblasStatus_t run_hipblas(hipblasHandle_t handle, const char* function, const Gemm& gemm) {
  return run(handle, function, gemm) ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_INVALID_VALUE;
}
rocblas_status run_rocblas(rocblas_handle handle, const char* function, const Gemm& gemm) {
  return run(handle, function, gemm) ? rocblas_status_success : rocblas_status_invalid_size;
}

}  // namespace

SIMULATED_EXPORT hipblasStatus_t hipblasCreate(hipblasHandle_t* handle) {
  *handle = reinterpret_cast<hipblasHandle_t>(new Handle);
  return HIPBLAS_STATUS_SUCCESS;
}
SIMULATED_EXPORT hipblasStatus_t hipblasDestroy(hipblasHandle_t handle) {
  delete reinterpret_cast<Handle*>(handle);
  return HIPBLAS_STATUS_SUCCESS;
}
SIMULATED_EXPORT hipblasStatus_t hipblasSetStream(hipblasHandle_t handle, hipStream_t stream) {
  reinterpret_cast<Handle*>(handle)->stream = stream;
  return HIPBLAS_STATUS_SUCCESS;
}
// A handle of hipBLAS is one of rocBLAS.
SIMULATED_EXPORT rocblas_status rocblas_set_stream(rocblas_handle handle, hipStream_t stream) {
  reinterpret_cast<Handle*>(handle)->stream = stream;
  return rocblas_status_success;
}
SIMULATED_EXPORT rocblas_status rocblas_get_stream(rocblas_handle handle, hipStream_t* stream) {
  *stream = stream_of(handle);
  return rocblas_status_success;
}
SIMULATED_EXPORT rocblas_status rocblas_get_version_string(char* text, size_t bytes) {
  std::snprintf(text, bytes, "5.2.0.simulated");
  return rocblas_status_success;
}

SIMULATED_EXPORT hipblasStatus_t hipblasGemmEx(hipblasHandle_t handle, hipblasOperation_t transpose_a,
                                               hipblasOperation_t transpose_b, int m, int n, int k, const void* alpha,
                                               const void* a, hipDataType a_type, int lda, const void* b,
                                               hipDataType b_type, int ldb, const void* beta, void* c,
                                               hipDataType c_type, int ldc, hipblasComputeType_t compute,
                                               hipblasGemmAlgo_t algorithm) {
  return hipblasGemmStridedBatchedEx(handle, transpose_a, transpose_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type,
                                     ldb, 0, beta, c, c_type, ldc, 0, 1, compute, algorithm);
}
SIMULATED_EXPORT hipblasStatus_t hipblasGemmStridedBatchedEx(
    hipblasHandle_t handle, hipblasOperation_t transpose_a, hipblasOperation_t transpose_b, int m, int n, int k,
    const void* alpha, const void* a, hipDataType a_type, int lda, hipblasStride a_stride, const void* b,
    hipDataType b_type, int ldb, hipblasStride b_stride, const void* beta, void* c, hipDataType c_type, int ldc,
    hipblasStride c_stride, int batch, hipblasComputeType_t compute, hipblasGemmAlgo_t) {
  constexpr const char* kName = "hipblasGemmStridedBatchedEx";
  using Operand = Matrix<hipDataType>;
  const Operand result{c, c_type, ldc, c_stride};
  return run_hipblas(handle, kName,
                     strided_gemm(kName, transpose_a, transpose_b, m, n, k, alpha, Operand{a, a_type, lda, a_stride},
                                  Operand{b, b_type, ldb, b_stride}, beta, result, result, batch, compute));
}

SIMULATED_EXPORT rocblas_status rocblas_gemm_ex(rocblas_handle handle, rocblas_operation transpose_a,
                                                rocblas_operation transpose_b, rocblas_int m, rocblas_int n,
                                                rocblas_int k, const void* alpha, const void* a,
                                                rocblas_datatype a_type, rocblas_int lda, const void* b,
                                                rocblas_datatype b_type, rocblas_int ldb, const void* beta,
                                                const void* c, rocblas_datatype c_type, rocblas_int ldc, void* d,
                                                rocblas_datatype d_type, rocblas_int ldd, rocblas_datatype compute,
                                                rocblas_gemm_algo algorithm, int32_t solution, uint32_t flags) {
  return rocblas_gemm_strided_batched_ex(handle, transpose_a, transpose_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type,
                                         ldb, 0, beta, c, c_type, ldc, 0, d, d_type, ldd, 0, 1, compute, algorithm,
                                         solution, flags);
}
SIMULATED_EXPORT rocblas_status rocblas_gemm_strided_batched_ex(
    rocblas_handle handle, rocblas_operation transpose_a, rocblas_operation transpose_b, rocblas_int m, rocblas_int n,
    rocblas_int k, const void* alpha, const void* a, rocblas_datatype a_type, rocblas_int lda, rocblas_stride a_stride,
    const void* b, rocblas_datatype b_type, rocblas_int ldb, rocblas_stride b_stride, const void* beta, const void* c,
    rocblas_datatype c_type, rocblas_int ldc, rocblas_stride c_stride, void* d, rocblas_datatype d_type,
    rocblas_int ldd, rocblas_stride d_stride, rocblas_int batch, rocblas_datatype compute, rocblas_gemm_algo, int32_t,
    uint32_t) {
  constexpr const char* kName = "rocblas_gemm_strided_batched_ex";
  using Operand = Matrix<rocblas_datatype>;
  return run_rocblas(handle, kName,
                     strided_gemm(kName, transpose_a, transpose_b, m, n, k, alpha, Operand{a, a_type, lda, a_stride},
                                  Operand{b, b_type, ldb, b_stride}, beta, Operand{c, c_type, ldc, c_stride},
                                  Operand{d, d_type, ldd, d_stride}, batch, compute));
}

SIMULATED_EXPORT hipblasStatus_t hipblasSgeam(hipblasHandle_t handle, hipblasOperation_t transpose_a,
                                              hipblasOperation_t transpose_b, int m, int n, const float* alpha,
                                              const float* a, int lda, const float* beta, const float* b, int ldb,
                                              float* c, int ldc) {
  constexpr const char* kName = "hipblasSgeam";
  simulated_hip_count(kName);
  const bool ta = is_transposed(transpose_a, kName), tb = is_transposed(transpose_b, kName);
  const float a_scale = *alpha, b_scale = *beta;
  if (m == 0 || n == 0) return HIPBLAS_STATUS_SUCCESS;
  if (lda < (ta ? n : m) || ldb < (tb ? n : m) || ldc < m) return HIPBLAS_STATUS_INVALID_VALUE;
  if (a_scale != 0) simulated::check_memory(kName, "A", a, 4 * extent(ta ? n : m, ta ? m : n, lda, 0, 1), 4);
  if (b_scale != 0) simulated::check_memory(kName, "B", b, 4 * extent(tb ? n : m, tb ? m : n, ldb, 0, 1), 4);
  simulated::check_memory(kName, "C", c, 4 * extent(m, n, ldc, 0, 1), 4);
  const hipError_t error = simulated::submit(stream_of(handle), [=] {
    const auto element = [](const float* matrix, bool transposed, int64_t leading, int64_t i, int64_t j) {
      return matrix[transposed ? i * leading + j : j * leading + i];
    };
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < m; ++i) {
        float sum = a_scale == 0 ? 0 : a_scale * element(a, ta, lda, i, j);
        if (b_scale != 0) sum += b_scale * element(b, tb, ldb, i, j);
        c[j * ldc + i] = sum;
      }
    }
  });
  return error == hipSuccess ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_EXECUTION_FAILED;
}

SIMULATED_EXPORT hipblasStatus_t hipblasScopy(hipblasHandle_t handle, int n, const float* x, int x_step, float* y,
                                              int y_step) {
  constexpr const char* kName = "hipblasScopy";
  simulated_hip_count(kName);
  if (n <= 0) return HIPBLAS_STATUS_SUCCESS;
  if (x_step < 0 || y_step < 1) fail("%s: steps %d and %d are not simulated", kName, x_step, y_step);
  simulated::check_memory(kName, "x", x, 4 * (size_t(n - 1) * x_step + 1), 4);
  simulated::check_memory(kName, "y", y, 4 * (size_t(n - 1) * y_step + 1), 4);
  const hipError_t error = simulated::submit(stream_of(handle), [=] {
    for (int64_t i = 0; i < n; ++i) y[i * y_step] = x[i * x_step];
  });
  return error == hipSuccess ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_EXECUTION_FAILED;
}

#undef rocblas_gemm_batched_ex
NOT_SIMULATED(hipblasDcopy)
NOT_SIMULATED(hipblasDgeam)
NOT_SIMULATED(rocblas_dgemm)
NOT_SIMULATED(rocblas_dgemm_batched)
NOT_SIMULATED(rocblas_dgemm_strided_batched)
NOT_SIMULATED(rocblas_gemm_batched_ex)
