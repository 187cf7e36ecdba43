// Runs the tuned or default candidate of an operator with a workspace from the session's pool.
#pragma once

#include "common/tuner.h"
#include "provider/kernel.h"

namespace sd_ort {

// Called after the outputs are allocated. While the stream is captured, nothing is tuned.
void run_op(const GpuOp& op, const void* params, KernelContext& context);

}  // namespace sd_ort
