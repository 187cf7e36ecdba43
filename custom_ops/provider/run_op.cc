#include "provider/run_op.h"

#include "provider/device.h"

namespace sd_ort {

void run_op(const GpuOp& op, const void* params, KernelContext& context) {
  const int candidate = Tuner::instance().choose(op, params, context.stream(), context.tensors().address(0));
  require(candidate >= 0, std::string(op.name()) + ": no kernel supports these shapes");
  const Workspace workspace(context.context(), context.tensors().memory(), op.workspace_bytes(candidate, params));
  const char* error = op.run(candidate, params, workspace.data(), context.stream());
  require(error == nullptr, std::string(op.name()) + ": " + (error == nullptr ? "" : error));
}

}  // namespace sd_ort
