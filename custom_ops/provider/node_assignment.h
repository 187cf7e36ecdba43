// Assignment of graph nodes to the provider (GetCapability).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "provider/node.h"
#include "provider/prefetched_weights.h"

namespace sd_ort {

struct UnassignedNode {
  std::string op_type, name;  // the name may be empty
  const char* reason;
};

struct Assignment {
  std::vector<const OrtNode*> assigned;
  std::vector<UnassignedNode> unassigned;
  std::set<std::string> unused_outputs;      // outputs of assigned nodes without a consumer
  std::vector<const OrtNode*> host_readers;  // nodes that would read a prefetched weight on the host
};

// Assigns nodes that have a kernel, except shape arithmetic: integers computed from shapes and constants alone stay on
// the CPU provider, since Reshape and Expand read them on the host. If a node would read one of the prefetched
// `weights` (may be null) on the host, `weights` is rejected with that reason.
Assignment assign(const OrtGraph* graph, OrtEpGraphSupportInfo* support, PrefetchedWeights* weights);

}  // namespace sd_ort
