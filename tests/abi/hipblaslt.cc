// common/blas_lt.h for AMD against hipblaslt.h. Macros: __HIP_PLATFORM_AMD__.
#include <hipblaslt/hipblaslt.h>

#include <cstddef>

#include "common/blas_lt.h"
#include "same_abi.h"

namespace sd_ort {

struct BlasLtAssertions {
  using B = BlasLt;
  static_assert(HIPBLAS_STATUS_SUCCESS == 0);
  static_assert(B::kCompute == HIPBLAS_COMPUTE_32F);
  static_assert(B::kTransposed == HIPBLAS_OP_T && sizeof(B::kTransposed) == sizeof(hipblasOperation_t));
  static_assert(B::kTransposeWeight == HIPBLASLT_MATMUL_DESC_TRANSA);
  static_assert(B::kEpilogue == HIPBLASLT_MATMUL_DESC_EPILOGUE);
  static_assert(B::kBiasPointer == HIPBLASLT_MATMUL_DESC_BIAS_POINTER);
  static_assert(B::kWeightScale == HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  static_assert(B::kYFactor == HIPBLASLT_MATMUL_DESC_D_SCALE_POINTER);
  static_assert(B::kBiasType == HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
  static_assert(B::kFloat8 == HIP_R_8F_E4M3 && B::kFloat8Fnuz == HIP_R_8F_E4M3_FNUZ);
  static_assert(B::kBatchCount == HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
  static_assert(B::kBatchStride == HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
  static_assert(B::kEpilogueBias == HIPBLASLT_EPILOGUE_BIAS && B::kEpilogueGelu == HIPBLASLT_EPILOGUE_GELU);
  static_assert((B::kEpilogueBias | B::kEpilogueGelu) == HIPBLASLT_EPILOGUE_GELU_BIAS);
  static_assert(sizeof(B::kEpilogueBias) == sizeof(hipblasLtEpilogue_t));
  static_assert(B::kMaxWorkspace == HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
  static_assert(B::kFloat32 == HIP_R_32F && B::kFloat16 == HIP_R_16F && B::kBFloat16 == HIP_R_16BF);

  static_assert(B::kAlgorithmBytes == sizeof(hipblasLtMatmulAlgo_t));
  static_assert(sizeof(B::Algorithm) == sizeof(hipblasLtMatmulHeuristicResult_t));
  static_assert(alignof(B::Algorithm) == alignof(hipblasLtMatmulHeuristicResult_t));
  static_assert(offsetof(hipblasLtMatmulHeuristicResult_t, algo) == 0 && offsetof(B::Algorithm, bytes) == 0);
  static_assert(offsetof(B::Algorithm, workspace_bytes) == offsetof(hipblasLtMatmulHeuristicResult_t, workspaceSize));
  static_assert(offsetof(B::Algorithm, status) == offsetof(hipblasLtMatmulHeuristicResult_t, state));
  static_assert(offsetof(B::Algorithm, waves) == offsetof(hipblasLtMatmulHeuristicResult_t, wavesCount));

  ASSERT_SAME_FUNCTION(B::create_, hipblasLtCreate);
  ASSERT_SAME_FUNCTION(B::create_gemm_, hipblasLtMatmulDescCreate);
  ASSERT_SAME_FUNCTION(B::set_attribute_, hipblasLtMatmulDescSetAttribute);
  ASSERT_SAME_FUNCTION(B::create_layout_, hipblasLtMatrixLayoutCreate);
  ASSERT_SAME_FUNCTION(B::set_layout_, hipblasLtMatrixLayoutSetAttribute);
  ASSERT_SAME_FUNCTION(B::create_preference_, hipblasLtMatmulPreferenceCreate);
  ASSERT_SAME_FUNCTION(B::set_preference_, hipblasLtMatmulPreferenceSetAttribute);
  ASSERT_SAME_FUNCTION(B::propose_, hipblasLtMatmulAlgoGetHeuristic);
  ASSERT_SAME_FUNCTION(B::matmul_, hipblasLtMatmul);
};

}  // namespace sd_ort
