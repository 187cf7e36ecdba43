// Which nodes of a graph the provider takes.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "provider/node.h"

namespace sd_ort {

struct Left {
  std::string op_type, node;  // the node's name, which may be empty
  const char* reason;
};

struct Assignment {
  std::vector<const OrtNode*> taken;
  std::vector<Left> left;
  std::set<std::string> unread;  // outputs behind the first, of taken nodes, that nobody reads
};

// Nodes with a kernel, but for shape arithmetic: integers computed from shapes and constants alone stay on the host,
// where ONNX Runtime's own kernels compute them and what they are for (Reshape, Expand) reads them.
Assignment assign(const OrtGraph* graph, OrtEpGraphSupportInfo* support);

}  // namespace sd_ort
