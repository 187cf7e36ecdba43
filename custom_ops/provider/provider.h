// Execution provider of one session: a device, a stream, a memory pool and captured GPU graphs.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "provider/gpu_graphs.h"
#include "provider/options.h"
#include "provider/ort.h"
#include "provider/pool.h"
#include "provider/prefetched_weights.h"

namespace sd_ort {

// Nodes that the session created last by this thread did not assign to the provider: a line each with operator, name
// and reason, separated by tabs. ONNX Runtime repeats the assignment after it changes a graph: the last line of a node
// counts.
inline thread_local std::string last_unassigned_nodes;

class Provider : public OrtEp {
 public:
  // `registry` and `memory` (of the device) are owned by the factory.
  Provider(const Options& options, const OrtKernelRegistry* registry, const OrtMemoryInfo* memory,
           const OrtLogger* logger);
  ~Provider();
  Provider(const Provider&) = delete;
  Provider& operator=(const Provider&) = delete;

  // Whether an output of a node has a consumer. Unused outputs are not written.
  bool is_used(const std::string& output) const { return unused_outputs_.count(output) == 0; }

  const std::shared_ptr<Pool>& pool() const { return pool_; }

  // Prefetched weights of the session, or null.
  PrefetchedWeights* weights() const;

 private:
  static Provider& of(OrtEp* self) { return *static_cast<Provider*>(self); }
  static const Provider& of(const OrtEp* self) { return *static_cast<const Provider*>(self); }

  void set_functions();
  void set_graph_functions();
  void assign_nodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support);
  void log(const std::string& message) const;

  const Options options_;
  const OrtKernelRegistry* registry_;
  const OrtMemoryInfo* memory_;
  const OrtLogger* logger_;
  std::shared_ptr<Pool> pool_;
  device::Stream stream_;
  std::unique_ptr<GpuGraphCache> graphs_;
  std::set<std::string> unused_outputs_;
};

// Returns the provider of the kernel's session.
const Provider& provider_of(const OrtKernelInfo* info);

}  // namespace sd_ort
