#include "provider/node_assignment.h"

#include <algorithm>

#include "provider/kernel.h"

namespace sd_ort {
namespace {

// Whether the node computes integers from constants and at least one value that is already on the host.
bool is_shape_arithmetic(const Node& node, const std::set<std::string>& on_host) {
  bool reads_shapes = false;
  for (const NodeValue& input : node.inputs) {
    if (!input.exists || input.is_constant) continue;
    if (on_host.count(input.name) == 0) return false;
    reads_shapes = true;
  }
  for (const NodeValue& output : node.outputs) {
    if (output.exists && !is_integer(output.type)) return false;
  }
  return reads_shapes;
}

bool is_used(const NodeValue& output) {
  size_t consumers = 0;
  bool is_graph_output = false;
  check(ort_api->ValueInfo_GetValueNumConsumers(output.info, &consumers));
  check(ort_api->ValueInfo_IsGraphOutput(output.info, &is_graph_output));
  return consumers > 0 || is_graph_output;
}

// Returns the name of a prefetched weight that the node would read on the host, or "". `spec` is the kernel that runs
// the node, or null for another provider.
std::string host_weight(const Node& node, const KernelSpec* spec, const PrefetchedWeights& weights) {
  for (const std::string& name : node.outer_values()) {
    if (weights.holds(name)) return name;
  }
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const bool on_host = spec == nullptr || std::count(spec->host_inputs.begin(), spec->host_inputs.end(), i) != 0;
    if (on_host && weights.holds(node.inputs[i].name)) return node.inputs[i].name;
  }
  return "";
}

}  // namespace

Assignment assign(const OrtGraph* graph, OrtEpGraphSupportInfo* support, PrefetchedWeights* weights) {
  size_t count = 0;
  check(ort_api->Graph_GetNumNodes(graph, &count));
  std::vector<const OrtNode*> nodes(count);
  check(ort_api->Graph_GetNodes(graph, nodes.data(), count));
  Assignment assignment;
  std::set<std::string> on_host;
  for (const OrtNode* ort_node : nodes) {
    const Node node(ort_node);
    const KernelSpec* spec = find_spec(node);
    const bool arithmetic = is_shape_arithmetic(node, on_host);
    const char* reason = arithmetic ? "it computes a shape, which stays on the CPU" : unsupported_reason(spec, node);
    const OrtKernelDef* definition = nullptr;
    if (reason == nullptr) {
      check(ep_api->EpGraphSupportInfo_LookUpKernel(support, ort_node, &definition));
      if (definition == nullptr) reason = "ONNX Runtime finds none of the provider's kernels for it";
    }
    if (reason != nullptr) assignment.unassigned.push_back({node.op_type, node.name, reason});
    const std::string weight =
        weights == nullptr ? "" : host_weight(node, definition == nullptr ? nullptr : spec, *weights);
    if (!weight.empty()) {
      weights->reject(node.op_type + " '" + node.name + "' reads '" + weight + "' on the host");
      assignment.host_readers.push_back(ort_node);
    }
    if (definition != nullptr) assignment.assigned.push_back(ort_node);
    for (size_t i = 0; definition != nullptr && i < node.outputs.size(); ++i) {
      const NodeValue& output = node.outputs[i];
      if (output.exists && !is_used(output)) assignment.unused_outputs.insert(output.name);
    }
    for (const NodeValue& output : node.outputs) {
      if (definition == nullptr ? is_integer(output.type) : spec->host_output) on_host.insert(output.name);
    }
  }
  return assignment;
}

}  // namespace sd_ort
