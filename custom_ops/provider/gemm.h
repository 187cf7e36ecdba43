// A matrix product as an operator with candidates.
#pragma once

#include "common/tunable.h"

namespace sd_ort {

const GpuOp& product_op();  // its Params are ProductParams of kernels/kernels.h

// The BLAS library, by its file's name, if it does not load: products then run in the plain kernel. Else null.
const char* missing_library();

}  // namespace sd_ort
