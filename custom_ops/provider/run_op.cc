#include "provider/run_op.h"

#include "provider/device.h"

namespace sd_ort {

void run_op(const GpuOp& op, const void* params, Call& call) {
  const void* const x = call.input(0).data;
  const bool overwrites = x != nullptr && op.outputs(params)[0].data == x;
  const int candidate = Tuner::instance().choose(op, params, call.stream(), overwrites);
  require(candidate >= 0, std::string(op.name()) + ": no kernel supports these shapes");
  const Workspace workspace(call.context(), call.tensors().memory(), op.workspace_bytes(candidate, params));
  const char* error = op.run(candidate, params, workspace.data(), call.stream());
  require(error == nullptr, std::string(op.name()) + ": " + (error == nullptr ? "" : error));
}

}  // namespace sd_ort
