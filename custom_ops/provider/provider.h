// A session's execution provider: one device, one stream, one pool, and the runs captured over them.
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

// Nodes that the session which this thread opened last left to other providers: operator, name and reason, with tabs
// between, a line each. ONNX Runtime asks again when it has changed a graph: a node's last line counts.
inline thread_local std::string left_by_this_thread;

class Provider : public OrtEp {
 public:
  // `registry` and `memory` (of the device) are the factory's.
  Provider(const Options& options, const OrtKernelRegistry* registry, const OrtMemoryInfo* memory,
           const OrtLogger* logger);
  ~Provider();
  Provider(const Provider&) = delete;
  Provider& operator=(const Provider&) = delete;

  // Whether a node's output, not its first, is read by anybody: a sum that nobody reads need not be written.
  bool is_read(const std::string& output) const { return unread_.count(output) == 0; }

  // The session's device memory.
  const std::shared_ptr<Pool>& pool() const { return pool_; }

  // Those that the session was given, or null.
  Weights* weights() const;

 private:
  static Provider& of(OrtEp* self) { return *static_cast<Provider*>(self); }
  static const Provider& of(const OrtEp* self) { return *static_cast<const Provider*>(self); }

  void set_functions();
  void set_graph_functions();
  void take_nodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support);
  void log(const std::string& message) const;

  const Options options_;
  const OrtKernelRegistry* registry_;
  const OrtMemoryInfo* memory_;
  const OrtLogger* logger_;
  std::shared_ptr<Pool> pool_;
  device::Stream stream_;
  std::unique_ptr<Graphs> graphs_;
  std::set<std::string> unread_;
};

// That of the session which has the kernel.
const Provider& provider_of(const OrtKernelInfo* info);

}  // namespace sd_ort
