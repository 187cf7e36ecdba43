#include "provider/provider.h"

#include <cstdlib>

#include "common/tuner.h"
#include "provider/allocator.h"
#include "provider/device.h"
#include "provider/node_assignment.h"
#include "provider/profiler.h"
#include "provider/stream.h"

namespace sd_ort {
namespace {

// Returns the graph id of a run: run option gpu_graph_id, 0 by default.
int graph_id_of(const OrtRunOptions* options) {
  const char* entry = options == nullptr ? nullptr : ort_api->GetRunConfigEntry(options, "gpu_graph_id");
  return entry == nullptr ? 0 : std::atoi(entry);
}

}  // namespace

Provider::Provider(const Options& options, const OrtKernelRegistry* registry, const OrtMemoryInfo* memory,
                   const OrtLogger* logger)
    : OrtEp{},
      options_(options),
      registry_(registry),
      memory_(memory),
      logger_(logger),
      pool_(options.shared_pool ? Pool::shared(options.device_id, options.user_compute_stream, options.memory_limit)
                                : std::make_shared<Pool>(options.device_id, options.memory_limit)) {
  last_unassigned_nodes.clear();
  device::use(options_.device_id);
  stream_ = options_.has_user_stream ? options_.user_compute_stream : device::create_stream();
  device::add_session_stream(options_.device_id, stream_);
  graphs_ = std::make_unique<GpuGraphCache>(stream_);
  Tuner::instance().time_with_replaced_memsets();
  if (options_.tuning) Tuner::instance().enable(true);
  ort_version_supported = ORT_API_VERSION;
  set_functions();
  set_graph_functions();
}

Provider::~Provider() {
  graphs_.reset();
  device::remove_session_stream(options_.device_id, stream_);
  if (!options_.has_user_stream) device::destroy_stream(stream_);
}

void Provider::set_functions() {
  GetName = [](const OrtEp*) noexcept { return device::kProvider; };
  GetKernelRegistry = [](OrtEp* self, const OrtKernelRegistry** registry) noexcept -> OrtStatus* {
    *registry = of(self).registry_;
    return nullptr;
  };
  GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* support) noexcept {
    return guarded([&] { of(self).assign_nodes(graph, support); });
  };
  CreateAllocator = [](OrtEp* self, const OrtMemoryInfo* memory, OrtAllocator** allocator) noexcept {
    return guarded([&] {
      const bool pinned = ep_api->MemoryDevice_GetMemoryType(ep_api->MemoryInfo_GetMemoryDevice(memory)) ==
                          OrtDeviceMemoryType_HOST_ACCESSIBLE;
      if (pinned) {
        *allocator = new PinnedAllocator(memory);
      } else {
        *allocator = new DeviceAllocator(memory, of(self).pool_);
      }
    });
  };
  CreateSyncStreamForDevice = [](OrtEp* self, const OrtMemoryDevice*, OrtSyncStreamImpl** stream) noexcept {
    return guarded([&] { *stream = new SyncStream(of(self).stream_, of(self).options_.device_id); });
  };
  IsConcurrentRunSupported = [](OrtEp*, bool* supported) noexcept -> OrtStatus* {
    *supported = false;  // one stream and one pool per session; ONNX Runtime serializes the runs
    return nullptr;
  };
  Sync = [](OrtEp* self) noexcept { return guarded([&] { device::wait(of(self).stream_); }); };
  CreateProfiler = [](OrtEp* self, OrtEpProfilerImpl** profiler) noexcept {
    return guarded([&] { *profiler = new Profiler(of(self).stream_, of(self).options_.device_id); });
  };
  GetDefaultMemoryDevice = [](const OrtEp* self, const OrtMemoryDevice** device) noexcept -> OrtStatus* {
    *device = ep_api->MemoryInfo_GetMemoryDevice(of(self).memory_);
    return nullptr;
  };
  GetAvailableResource = [](const OrtEp* self, OrtResourceCount* available) noexcept {
    return guarded([&] {
      device::use(of(self).options_.device_id);
      *available = OrtResourceCount::FromTotalBytes(std::min(device::memory().free, of(self).options_.memory_limit));
    });
  };
}

void Provider::set_graph_functions() {
  OnRunStart = [](OrtEp* self, const OrtRunOptions* options) noexcept {
    return guarded([&] {
      device::use(of(self).options_.device_id);
      if (of(self).options_.graph) of(self).graphs_->begin_run(graph_id_of(options));
    });
  };
  OnRunEnd = [](OrtEp* self, const OrtRunOptions* options, bool sync_stream) noexcept {
    return guarded([&] {
      if (of(self).options_.graph) {
        of(self).graphs_->end_run(graph_id_of(options));
        if (of(self).graphs_->is_captured(graph_id_of(options))) of(self).pool_->pin_segments();
      }
      if (sync_stream) device::wait(of(self).stream_);
    });
  };
  IsGraphCaptureEnabled = [](const OrtEp* self) noexcept { return of(self).options_.graph; };
  IsGraphCaptured = [](const OrtEp* self, int graph_id) noexcept { return of(self).graphs_->is_captured(graph_id); };
  ReplayGraph = [](OrtEp* self, int graph_id) noexcept {
    return guarded([&] {
      device::use(of(self).options_.device_id);
      of(self).graphs_->replay(graph_id);
    });
  };
  ReleaseCapturedGraph = [](OrtEp* self, int graph_id) noexcept {
    return guarded([&] { of(self).graphs_->release(graph_id); });
  };
  GetGraphCaptureNodeAssignmentPolicy = [](const OrtEp*) noexcept {
    return OrtGraphCaptureNodeAssignmentPolicy_ALLOW_CPU_FOR_SHAPES;
  };
}

void Provider::assign_nodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
  const Assignment assignment = assign(graph, support, weights());
  for (const OrtNode* node : assignment.assigned) check(ep_api->EpGraphSupportInfo_AddSingleNode(support, node));
  // ONNX Runtime ignores an error here, and a CPU kernel may read its weights while the session is created. Assigning a
  // node without a kernel makes the creation of the session fail before that.
  for (const OrtNode* node : assignment.host_readers) check(ep_api->EpGraphSupportInfo_AddSingleNode(support, node));
  unused_outputs_.insert(assignment.unused_outputs.begin(), assignment.unused_outputs.end());
  for (const UnassignedNode& node : assignment.unassigned) {
    log("not assigned: " + node.op_type + " '" + node.name + "': " + node.reason);
    last_unassigned_nodes += node.op_type + '\t' + node.name + '\t' + node.reason + '\n';
  }
}

const Provider& provider_of(const OrtKernelInfo* info) {
  const OrtEp* provider = nullptr;
  check(ep_api->KernelInfo_GetEp(info, &provider));
  return *static_cast<const Provider*>(provider);
}

PrefetchedWeights* Provider::weights() const { return static_cast<PrefetchedWeights*>(options_.weights); }

void Provider::log(const std::string& message) const {
  check(ort_api->Logger_LogMessage(logger_, ORT_LOGGING_LEVEL_INFO, message.c_str(), ORT_FILE, __LINE__, __func__));
}

}  // namespace sd_ort
