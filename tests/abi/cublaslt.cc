// common/blas_lt.h for NVIDIA against cublasLt.h.
#include <cublasLt.h>

#include <cstddef>

#include "common/blas_lt.h"
#include "same_abi.h"

namespace sd_ort {

struct BlasLtAssertions {
  using B = BlasLt;
  static_assert(CUBLAS_STATUS_SUCCESS == 0);
  static_assert(B::kCompute == CUBLAS_COMPUTE_32F);
  static_assert(B::kTransposed == CUBLAS_OP_T && sizeof(B::kTransposed) == sizeof(cublasOperation_t));
  static_assert(B::kTransposeWeight == CUBLASLT_MATMUL_DESC_TRANSA);
  static_assert(B::kEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
  static_assert(B::kBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
  static_assert(B::kWeightScale == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  static_assert(B::kYFactor == CUBLASLT_MATMUL_DESC_D_SCALE_POINTER);
  static_assert(B::kBiasType == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE && sizeof(int) == sizeof(cudaDataType_t));
  static_assert(B::kFastSums == CUBLASLT_MATMUL_DESC_FAST_ACCUM && B::kFloat8 == CUDA_R_8F_E4M3);
  static_assert(B::kBatchCount == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
  static_assert(B::kBatchStride == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
  static_assert(B::kEpilogueBias == CUBLASLT_EPILOGUE_BIAS && B::kEpilogueGelu == CUBLASLT_EPILOGUE_GELU);
  static_assert((B::kEpilogueBias | B::kEpilogueGelu) == CUBLASLT_EPILOGUE_GELU_BIAS);
  static_assert(sizeof(B::kEpilogueBias) == sizeof(cublasLtEpilogue_t));
  static_assert(B::kMaxWorkspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
  static_assert(B::kFirstAlignment == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
  static_assert(B::kFirstAlignment + 1 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
  static_assert(B::kFirstAlignment + 2 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
  static_assert(B::kLastAlignment == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES && B::kLastAlignment == 8);
  static_assert(B::kFloat32 == CUDA_R_32F && B::kFloat16 == CUDA_R_16F && B::kBFloat16 == CUDA_R_16BF);

  static_assert(B::kAlgorithmBytes == sizeof(cublasLtMatmulAlgo_t));
  static_assert(sizeof(B::Algorithm) == sizeof(cublasLtMatmulHeuristicResult_t));
  static_assert(alignof(B::Algorithm) == alignof(cublasLtMatmulHeuristicResult_t));
  static_assert(offsetof(cublasLtMatmulHeuristicResult_t, algo) == 0 && offsetof(B::Algorithm, bytes) == 0);
  static_assert(offsetof(B::Algorithm, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
  static_assert(offsetof(B::Algorithm, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));
  static_assert(offsetof(B::Algorithm, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

  ASSERT_SAME_FUNCTION(B::create_, cublasLtCreate);
  ASSERT_SAME_FUNCTION(B::create_gemm_, cublasLtMatmulDescCreate);
  ASSERT_SAME_FUNCTION(B::set_attribute_, cublasLtMatmulDescSetAttribute);
  ASSERT_SAME_FUNCTION(B::create_layout_, cublasLtMatrixLayoutCreate);
  ASSERT_SAME_FUNCTION(B::set_layout_, cublasLtMatrixLayoutSetAttribute);
  ASSERT_SAME_FUNCTION(B::create_preference_, cublasLtMatmulPreferenceCreate);
  ASSERT_SAME_FUNCTION(B::set_preference_, cublasLtMatmulPreferenceSetAttribute);
  ASSERT_SAME_FUNCTION(B::propose_, cublasLtMatmulAlgoGetHeuristic);
  ASSERT_SAME_FUNCTION(B::matmul_, cublasLtMatmul);
};

}  // namespace sd_ort
