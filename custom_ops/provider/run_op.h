// Runs an operator that has candidates: the tuned one or the default, with its workspace from the session's pool.
#pragma once

#include "common/tuner.h"
#include "provider/kernel.h"

namespace sd_ort {

// After the outputs are allocated. A stream that captures runs what was chosen before, since measuring waits.
void run_op(const GpuOp& op, const void* params, Call& call);

}  // namespace sd_ort
