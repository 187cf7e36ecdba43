// common/tensor_map.h against cuda.h.
#include <cuda.h>

#include "common/tensor_map.h"
#include "same_abi.h"

namespace sd_ort {
namespace bulk {

static_assert(sizeof(Matrix) == sizeof(CUtensorMap) && alignof(Matrix) >= alignof(CUtensorMap));
static_assert(kUint16 == CU_TENSOR_MAP_DATA_TYPE_UINT16);
static_assert(kNoInterleave == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(kSwizzle128 == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(kPromote128Bytes == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(kZeros == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(CUDA_SUCCESS == 0);
ASSERT_SAME_FUNCTION(EncodeTiled{}, cuTensorMapEncodeTiled);

}  // namespace bulk
}  // namespace sd_ort
