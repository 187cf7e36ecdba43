// common/cudnn.h and what the operators' cudnn.h take of it, against cudnn.h (8.9 and 9).
#include "common/cudnn.h"

#include <cudnn.h>
#include <cudnn_backend.h>

#include "same_abi.h"

namespace sd_ort {

static_assert(cudnn_attribute::kPointwiseMode == CUDNN_ATTR_POINTWISE_MODE);
static_assert(cudnn_attribute::kPointwisePrecision == CUDNN_ATTR_POINTWISE_MATH_PREC);
static_assert(cudnn_attribute::kConvolutionType == CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
static_assert(cudnn_attribute::kConvolutionMode == CUDNN_ATTR_CONVOLUTION_CONV_MODE);
static_assert(cudnn_attribute::kConvolutionDilations == CUDNN_ATTR_CONVOLUTION_DILATIONS);
static_assert(cudnn_attribute::kConvolutionStrides == CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
static_assert(cudnn_attribute::kConvolutionPadsAfter == CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
static_assert(cudnn_attribute::kConvolutionPadsBefore == CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
static_assert(cudnn_attribute::kConvolutionAxes == CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS);
static_assert(cudnn_attribute::kHeuristicsMode == CUDNN_ATTR_ENGINEHEUR_MODE);
static_assert(cudnn_attribute::kHeuristicsGraph == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
static_assert(cudnn_attribute::kHeuristicsResults == CUDNN_ATTR_ENGINEHEUR_RESULTS);
static_assert(cudnn_attribute::kConfigEngine == CUDNN_ATTR_ENGINECFG_ENGINE);
static_assert(cudnn_attribute::kPlanHandle == CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
static_assert(cudnn_attribute::kPlanConfig == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
static_assert(cudnn_attribute::kPlanWorkspaceBytes == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
static_assert(cudnn_attribute::kForwardAlpha == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA);
static_assert(cudnn_attribute::kForwardBeta == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA);
static_assert(cudnn_attribute::kForwardConvolution == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC);
static_assert(cudnn_attribute::kForwardFilters == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W);
static_assert(cudnn_attribute::kForwardX == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X);
static_assert(cudnn_attribute::kForwardY == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y);
static_assert(cudnn_attribute::kPointwiseMath == CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
static_assert(cudnn_attribute::kPointwiseX == CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
static_assert(cudnn_attribute::kPointwiseB == CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
static_assert(cudnn_attribute::kPointwiseY == CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
static_assert(cudnn_attribute::kGraphHandle == CUDNN_ATTR_OPERATIONGRAPH_HANDLE);
static_assert(cudnn_attribute::kGraphOperations == CUDNN_ATTR_OPERATIONGRAPH_OPS);
static_assert(cudnn_attribute::kTensorAlignment == CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
static_assert(cudnn_attribute::kTensorType == CUDNN_ATTR_TENSOR_DATA_TYPE);
static_assert(cudnn_attribute::kTensorSizes == CUDNN_ATTR_TENSOR_DIMENSIONS);
static_assert(cudnn_attribute::kTensorStrides == CUDNN_ATTR_TENSOR_STRIDES);
static_assert(cudnn_attribute::kTensorId == CUDNN_ATTR_TENSOR_UNIQUE_ID);
static_assert(cudnn_attribute::kTensorIsVirtual == CUDNN_ATTR_TENSOR_IS_VIRTUAL);
static_assert(cudnn_attribute::kTensorIsByValue == CUDNN_ATTR_TENSOR_IS_BY_VALUE);
static_assert(cudnn_attribute::kPackIds == CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
static_assert(cudnn_attribute::kPackPointers == CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
static_assert(cudnn_attribute::kPackWorkspace == CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
static_assert(cudnn_attribute::kEngineNotes == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
static_assert(cudnn_attribute::kMatMulType == CUDNN_ATTR_MATMUL_COMP_TYPE);
static_assert(cudnn_attribute::kMatMulA == CUDNN_ATTR_OPERATION_MATMUL_ADESC);
static_assert(cudnn_attribute::kMatMulB == CUDNN_ATTR_OPERATION_MATMUL_BDESC);
static_assert(cudnn_attribute::kMatMulC == CUDNN_ATTR_OPERATION_MATMUL_CDESC);
static_assert(cudnn_attribute::kMatMulMath == CUDNN_ATTR_OPERATION_MATMUL_DESC);
static_assert(cudnn_attribute::kReductionMode == CUDNN_ATTR_REDUCTION_OPERATOR);
static_assert(cudnn_attribute::kReductionType == CUDNN_ATTR_REDUCTION_COMP_TYPE);
static_assert(cudnn_attribute::kReductionX == CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
static_assert(cudnn_attribute::kReductionY == CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
static_assert(cudnn_attribute::kReductionMath == CUDNN_ATTR_OPERATION_REDUCTION_DESC);

struct CudnnAssertions {
  using C = Cudnn;
  static_assert(CUDNN_STATUS_SUCCESS == 0);
  // cudnnBackendDescriptorType_t
  static_assert(C::kPointwise == CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  static_assert(C::kConvolution == CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  static_assert(C::kEngine == CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  static_assert(C::kConfig == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  static_assert(C::kHeuristics == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  static_assert(C::kExecutionPlan == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  static_assert(C::kConvolutionForward == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  static_assert(C::kPointwiseOperation == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  static_assert(C::kOperationGraph == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  static_assert(C::kVariantPack == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  static_assert(C::kTensor == CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  static_assert(C::kMatMul == CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  static_assert(C::kMatMulOperation == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  static_assert(C::kReduction == CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  static_assert(C::kReductionOperation == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  // cudnnBackendAttributeType_t, and the sizes of what is given by address
  static_assert(C::kTypeHandle == CUDNN_TYPE_HANDLE && sizeof(C::handle_) == sizeof(cudnnHandle_t));
  static_assert(C::kTypeData == CUDNN_TYPE_DATA_TYPE && sizeof(C::kFloat) == sizeof(cudnnDataType_t));
  static_assert(C::kTypeBoolean == CUDNN_TYPE_BOOLEAN);
  static_assert(C::kTypeInt64 == CUDNN_TYPE_INT64);
  static_assert(C::kTypeFloat == CUDNN_TYPE_FLOAT);
  static_assert(C::kTypePointer == CUDNN_TYPE_VOID_PTR);
  static_assert(C::kTypeConvolutionMode == CUDNN_TYPE_CONVOLUTION_MODE);
  static_assert(sizeof(C::kCrossCorrelation) == sizeof(cudnnConvolutionMode_t));
  static_assert(C::kTypeHeuristics == CUDNN_TYPE_HEUR_MODE &&
                sizeof(C::kHeuristicModeA) == sizeof(cudnnBackendHeurMode_t));
  static_assert(C::kTypeNote == CUDNN_TYPE_NUMERICAL_NOTE && sizeof(int) == sizeof(cudnnBackendNumericalNote_t));
  static_assert(C::kTypePointwise == CUDNN_TYPE_POINTWISE_MODE && sizeof(int) == sizeof(cudnnPointwiseMode_t));
  static_assert(C::kTypeDescriptor == CUDNN_TYPE_BACKEND_DESCRIPTOR);
  static_assert(sizeof(cudnnBackendDescriptor_t) == sizeof(void*));
  static_assert(C::kTypeReduction == CUDNN_TYPE_REDUCTION_OPERATOR_TYPE &&
                sizeof(int) == sizeof(cudnnReduceTensorOp_t));
  // Values
  static_assert(C::kFloat == CUDNN_DATA_FLOAT && C::kHalf == CUDNN_DATA_HALF && C::kBFloat16 == CUDNN_DATA_BFLOAT16);
  static_assert(C::kCrossCorrelation == CUDNN_CROSS_CORRELATION);
  static_assert(C::kHeuristicModeA == CUDNN_HEUR_MODE_A && C::kHeuristicFallback == CUDNN_HEUR_MODE_FALLBACK);
  static_assert(C::Graph::kAdd == CUDNN_POINTWISE_ADD && C::Graph::kMultiply == CUDNN_POINTWISE_MUL);
  static_assert(C::Graph::kDivide == CUDNN_POINTWISE_DIV && C::Graph::kSubtract == CUDNN_POINTWISE_SUB);
  static_assert(C::Graph::kExp == CUDNN_POINTWISE_EXP && C::Graph::kLog == CUDNN_POINTWISE_LOG);
  static_assert(C::Graph::kRelu == CUDNN_POINTWISE_RELU_FWD);
  static_assert(C::Graph::kSum == CUDNN_REDUCE_TENSOR_ADD && C::Graph::kMaximum == CUDNN_REDUCE_TENSOR_MAX);
  // Notes of an engine that is not exact: all up to kLastInexactNote but one.
  static_assert(CUDNN_NUMERICAL_NOTE_TENSOR_CORE == 0 && CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS == 1);
  static_assert(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION == 2 && CUDNN_NUMERICAL_NOTE_FFT == 3);
  static_assert(C::kNondeterministic == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
  static_assert(CUDNN_NUMERICAL_NOTE_WINOGRAD == 5 && CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4 == 6);
  static_assert(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 == 7);
  static_assert(C::kLastInexactNote == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13);

  ASSERT_SAME_FUNCTION(C::create_handle_, cudnnCreate);
  ASSERT_SAME_FUNCTION(C::set_stream_, cudnnSetStream);
  ASSERT_SAME_FUNCTION(C::create_, cudnnBackendCreateDescriptor);
  ASSERT_SAME_FUNCTION(C::destroy_, cudnnBackendDestroyDescriptor);
  ASSERT_SAME_FUNCTION(C::set_, cudnnBackendSetAttribute);
  ASSERT_SAME_FUNCTION(C::get_, cudnnBackendGetAttribute);
  ASSERT_SAME_FUNCTION(C::finalize_, cudnnBackendFinalize);
  ASSERT_SAME_FUNCTION(C::execute_, cudnnBackendExecute);
};

}  // namespace sd_ort
