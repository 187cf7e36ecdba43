// Which nodes of a graph the provider takes.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "provider/node.h"
#include "provider/prefetched_weights.h"

namespace sd_ort {

struct Left {
  std::string op_type, node;  // the node's name, which may be empty
  const char* reason;
};

struct Assignment {
  std::vector<const OrtNode*> taken;
  std::vector<Left> left;
  std::set<std::string> unread;           // outputs behind the first, of taken nodes, that nobody reads
  std::vector<const OrtNode*> misplaced;  // that would read on the host what lies on the device
};

// Nodes with a kernel, but for shape arithmetic: integers computed from shapes and constants alone stay on the host,
// where ONNX Runtime's own kernels compute them and what they are for (Reshape, Expand) reads
// them. `weights`, or null, lie on the device: they are told when a node would read one on the host.
Assignment assign(const OrtGraph* graph, OrtEpGraphSupportInfo* support, Weights* weights);

}  // namespace sd_ort
