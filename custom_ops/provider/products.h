// A matrix product as an operator with candidates.
#pragma once

#include "common/tunable.h"

namespace sd_ort {

const GpuOp& product_op();  // its Params are ProductParams of kernels/kernels.h

}  // namespace sd_ort
