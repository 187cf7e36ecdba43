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

// The number of a run's graph: what the caller's run options say, 0 when they say nothing.
int graph_number(const OrtRunOptions* options) {
  const char* given = options == nullptr ? nullptr : ort_api->GetRunConfigEntry(options, "gpu_graph_id");
  return given == nullptr ? 0 : std::atoi(given);
}

}  // namespace

Provider::Provider(const Options& options, const OrtKernelRegistry* registry, const OrtMemoryInfo* memory,
                   const OrtLogger* logger)
    : OrtEp{},
      options_(options),
      registry_(registry),
      memory_(memory),
      logger_(logger),
      pool_(std::make_shared<Pool>(options.device_id, options.memory_limit)) {
  left_by_this_thread.clear();
  device::use(options_.device_id);
  stream_ = options_.has_user_stream ? options_.user_compute_stream : device::create_stream();
  device::add_session_stream(options_.device_id, stream_);
  graphs_ = std::make_unique<Graphs>(stream_);
  Tuner::instance().time_without_memsets();
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
    return guarded([&] { of(self).take_nodes(graph, support); });
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
    *supported = false;  // one stream and one pool a session; ONNX Runtime lets threads take turns
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
      if (of(self).options_.graph) of(self).graphs_->begin_run(graph_number(options));
    });
  };
  OnRunEnd = [](OrtEp* self, const OrtRunOptions* options, bool sync_stream) noexcept {
    return guarded([&] {
      if (of(self).options_.graph) {
        of(self).graphs_->end_run(graph_number(options));
        if (of(self).graphs_->is_captured(graph_number(options))) of(self).pool_->keep_all();
      }
      if (sync_stream) device::wait(of(self).stream_);
    });
  };
  IsGraphCaptureEnabled = [](const OrtEp* self) noexcept { return of(self).options_.graph; };
  IsGraphCaptured = [](const OrtEp* self, int number) noexcept { return of(self).graphs_->is_captured(number); };
  ReplayGraph = [](OrtEp* self, int number) noexcept {
    return guarded([&] {
      device::use(of(self).options_.device_id);
      of(self).graphs_->replay(number);
    });
  };
  ReleaseCapturedGraph = [](OrtEp* self, int number) noexcept {
    return guarded([&] { of(self).graphs_->release(number); });
  };
  GetGraphCaptureNodeAssignmentPolicy = [](const OrtEp*) noexcept {
    return OrtGraphCaptureNodeAssignmentPolicy_ALLOW_CPU_FOR_SHAPES;
  };
}

void Provider::take_nodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
  const Assignment assignment = assign(graph, support, weights());
  for (const OrtNode* node : assignment.taken) check(ep_api->EpGraphSupportInfo_AddSingleNode(support, node));
  // What fails here is passed over, and a CPU's kernel may read its weights before the session is complete. But without
  // a kernel for each node of its own no session comes as far as that.
  for (const OrtNode* node : assignment.misplaced) check(ep_api->EpGraphSupportInfo_AddSingleNode(support, node));
  unread_.insert(assignment.unread.begin(), assignment.unread.end());
  for (const Left& left : assignment.left) {
    log("left to other providers: " + left.op_type + " '" + left.node + "': " + left.reason);
    left_by_this_thread += left.op_type + '\t' + left.node + '\t' + left.reason + '\n';
  }
}

const Provider& provider_of(const OrtKernelInfo* info) {
  const OrtEp* provider = nullptr;
  check(ep_api->KernelInfo_GetEp(info, &provider));
  return *static_cast<const Provider*>(provider);
}

Weights* Provider::weights() const { return static_cast<Weights*>(options_.weights); }

void Provider::log(const std::string& message) const {
  check(ort_api->Logger_LogMessage(logger_, ORT_LOGGING_LEVEL_INFO, message.c_str(), ORT_FILE, __LINE__, __func__));
}

}  // namespace sd_ort
