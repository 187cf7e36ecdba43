#include "provider/node_assignment.h"

#include <algorithm>

#include "provider/kernel.h"

namespace sd_ort {
namespace {

// Whether the node computes integers from what is on the host already. Constants are on either side.
bool is_shape_arithmetic(const Node& node, const std::set<std::string>& on_host) {
  bool reads_shapes = false;
  for (const NodeValue& input : node.inputs) {
    if (!input.there || input.is_constant) continue;
    if (on_host.count(input.name) == 0) return false;
    reads_shapes = true;
  }
  for (const NodeValue& output : node.outputs) {
    if (output.there && !is_integer(output.type)) return false;
  }
  return reads_shapes;
}

bool is_read(const NodeValue& output) {
  size_t consumers = 0;
  bool leaves_the_graph = false;
  check(ort_api->ValueInfo_GetValueNumConsumers(output.info, &consumers));
  check(ort_api->ValueInfo_IsGraphOutput(output.info, &leaves_the_graph));
  return consumers > 0 || leaves_the_graph;
}

// The name of a weight that lies on the device and that the node reads on the host, or "". `taken`: the kernel that is
// to run the node, or null.
std::string misplaced(const Node& node, const KernelSpec* taken, const Weights& weights) {
  for (const std::string& name : node.outer_values()) {
    if (weights.holds(name)) return name;
  }
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const bool on_host = taken == nullptr || std::count(taken->host_inputs.begin(), taken->host_inputs.end(), i) != 0;
    if (on_host && weights.holds(node.inputs[i].name)) return node.inputs[i].name;
  }
  return "";
}

}  // namespace

Assignment assign(const OrtGraph* graph, OrtEpGraphSupportInfo* support, Weights* weights) {
  size_t count = 0;
  check(ort_api->Graph_GetNumNodes(graph, &count));
  std::vector<const OrtNode*> nodes(count);
  check(ort_api->Graph_GetNodes(graph, nodes.data(), count));
  Assignment assignment;
  std::set<std::string> on_host;
  for (const OrtNode* each : nodes) {
    const Node node(each);
    const KernelSpec* spec = find_spec(node);
    const bool arithmetic = is_shape_arithmetic(node, on_host);
    const char* reason = arithmetic ? "it computes a shape, which the host reads" : refuses(spec, node);
    const OrtKernelDef* found = nullptr;
    if (reason == nullptr) {
      check(ep_api->EpGraphSupportInfo_LookUpKernel(support, each, &found));
      if (found == nullptr) reason = "ONNX Runtime finds none of the provider's kernels for it";
    }
    if (reason != nullptr) assignment.left.push_back({node.op_type, node.name, reason});
    const std::string lost = weights == nullptr ? "" : misplaced(node, found == nullptr ? nullptr : spec, *weights);
    if (!lost.empty()) {
      weights->refuse(node.op_type + " '" + node.name + "' reads '" + lost + "' on the host");
      assignment.misplaced.push_back(each);
    }
    if (found != nullptr) assignment.taken.push_back(each);
    for (size_t i = 1; found != nullptr && i < node.outputs.size(); ++i) {
      const NodeValue& output = node.outputs[i];
      if (output.there && !is_read(output)) assignment.unread.insert(output.name);
    }
    for (const NodeValue& output : node.outputs) {
      if (found == nullptr ? is_integer(output.type) : spec->host_output) on_host.insert(output.name);
    }
  }
  return assignment;
}

}  // namespace sd_ort
