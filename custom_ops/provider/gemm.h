// General matrix multiply as an operator with candidates.
#pragma once

#include "common/tunable.h"

namespace sd_ort {

const GpuOp& gemm_op();  // its Params: GemmParams of kernels/kernels.h

// Returns the file name of the BLAS library if it cannot be loaded (GEMMs then run tiles or the generic kernel), else
// null.
const char* missing_library();

}  // namespace sd_ort
