// cuDNN's backend interface, loaded at run time without its headers. An operation graph is turned into execution plans.
// Without the library there are no plans. Plain C++; included only by candidates.cc.
//
// Declarations and constants follow NVIDIA's "cuDNN Backend API" (9.x; those used here are unchanged since 8.5).
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/op.h"
#include "common/platform.h"
#include "common/tuner.h"

namespace sd_ort {

// cudnnBackendAttributeName_t: CUDNN_ATTR_ and the name of the same index in tests/abi/cudnn.cc.
namespace cudnn_attribute {

enum : int {
  kPointwiseMode = 0,
  kPointwisePrecision = 1,
  kConvolutionType = 100,
  kConvolutionMode = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPadsAfter = 104,
  kConvolutionPadsBefore = 105,
  kConvolutionAxes = 106,
  kHeuristicsMode = 200,
  kHeuristicsGraph = 201,
  kHeuristicsResults = 202,
  kConfigEngine = 300,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspaceBytes = 402,
  kForwardAlpha = 700,
  kForwardBeta = 701,
  kForwardConvolution = 702,
  kForwardFilters = 703,
  kForwardX = 704,
  kForwardY = 705,
  kPointwiseMath = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorIsVirtual = 907,
  kTensorIsByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNotes = 1303,
  kMatMulType = 1500,
  kMatMulA = 1520,
  kMatMulB = 1521,
  kMatMulC = 1522,
  kMatMulMath = 1523,
  kReductionMode = 1600,
  kReductionType = 1601,
  kReductionX = 1610,
  kReductionY = 1611,
  kReductionMath = 1612,
};

}  // namespace cudnn_attribute

class Cudnn {
  friend struct CudnnAssertions;  // tests/abi

 public:
  // A backend descriptor; remembers whether a call on it failed.
  class Descriptor {
   public:
    explicit Descriptor(int kind) { ok_ = instance().create_(kind, &handle_) == 0; }
    ~Descriptor() {
      if (handle_ != nullptr) instance().destroy_(handle_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    void set(int attribute, int type, int64_t count, const void* values) {
      ok_ = ok_ && instance().set_(handle_, attribute, type, count, values) == 0;
    }
    void set(int attribute, const Descriptor& value) {
      ok_ = ok_ && value.ok_;
      void* handle = value.handle_;
      set(attribute, kTypeDescriptor, 1, &handle);
    }
    bool finalize() { return ok_ = ok_ && instance().finalize_(handle_) == 0; }
    void* get() const { return handle_; }

   private:
    void* handle_ = nullptr;
    bool ok_ = false;
  };

  // Operations over tensors. Tensors and operations live as long as the graph does.
  class Graph {
   public:
    enum class Place { kMemory, kVirtual, kHost };  // a virtual tensor has no memory; kHost is one float on the host
    enum Pointwise { kAdd = 0, kMultiply = 1, kDivide = 6, kSubtract = 9, kExp = 13, kLog = 15, kRelu = 100 };
    enum Reduction { kSum = 0, kMaximum = 3 };
    using Sizes = std::vector<int64_t>;

    // Excludes plans with less than float32 precision: TF32, Winograd and Fourier transforms.
    void require_float32() { requires_float32_ = true; }

    // `id` identifies the tensor in Memory; virtual tensors get one.
    const Descriptor& tensor(int64_t id, DType type, const Sizes& sizes, const Sizes& strides,
                             Place place = Place::kMemory) {
      const int64_t alignment = 16, rank = static_cast<int64_t>(sizes.size());
      const int data = type == DType::kFloat32 ? kFloat : type == DType::kFloat16 ? kHalf : kBFloat16;
      const bool is_virtual = place == Place::kVirtual, on_host = place == Place::kHost;
      Descriptor& descriptor = add(kTensor);
      descriptor.set(cudnn_attribute::kTensorType, kTypeData, 1, &data);
      descriptor.set(cudnn_attribute::kTensorSizes, kTypeInt64, rank, sizes.data());
      descriptor.set(cudnn_attribute::kTensorStrides, kTypeInt64, rank, strides.data());
      descriptor.set(cudnn_attribute::kTensorId, kTypeInt64, 1, &id);
      descriptor.set(cudnn_attribute::kTensorAlignment, kTypeInt64, 1, &alignment);
      descriptor.set(cudnn_attribute::kTensorIsVirtual, kTypeBoolean, 1, &is_virtual);
      if (on_host) descriptor.set(cudnn_attribute::kTensorIsByValue, kTypeBoolean, 1, &on_host);
      descriptor.finalize();
      return descriptor;
    }
    const Descriptor& intermediate(const Sizes& sizes, const Sizes& strides, DType type = DType::kFloat32) {
      return tensor(next_id_++, type, sizes, strides, Place::kVirtual);
    }

    // y = convolution of x with filters; `description` is of kind kConvolution.
    Descriptor& description(int kind) { return add(kind); }
    void convolution(const Descriptor& description, const Descriptor& x, const Descriptor& filters,
                     const Descriptor& y) {
      const float one = 1.f, zero = 0.f;
      Descriptor& descriptor = operation(kConvolutionForward);
      descriptor.set(cudnn_attribute::kForwardAlpha, kTypeFloat, 1, &one);
      descriptor.set(cudnn_attribute::kForwardBeta, kTypeFloat, 1, &zero);
      descriptor.set(cudnn_attribute::kForwardConvolution, description);
      descriptor.set(cudnn_attribute::kForwardFilters, filters);
      descriptor.set(cudnn_attribute::kForwardX, x);
      descriptor.set(cudnn_attribute::kForwardY, y);
      descriptor.finalize();
    }
    // y = a b over the last two axes.
    void matmul(const Descriptor& a, const Descriptor& b, const Descriptor& y) {
      Descriptor& math = add(kMatMul);
      math.set(cudnn_attribute::kMatMulType, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& descriptor = operation(kMatMulOperation);
      descriptor.set(cudnn_attribute::kMatMulA, a);
      descriptor.set(cudnn_attribute::kMatMulB, b);
      descriptor.set(cudnn_attribute::kMatMulC, y);
      descriptor.set(cudnn_attribute::kMatMulMath, math);
      descriptor.finalize();
    }
    // y = mode(a) or mode(a, b) with b broadcast.
    void pointwise(Pointwise mode, const Descriptor& a, const Descriptor* b, const Descriptor& y) {
      const int value = mode;
      Descriptor& math = add(kPointwise);
      math.set(cudnn_attribute::kPointwiseMode, kTypePointwise, 1, &value);
      math.set(cudnn_attribute::kPointwisePrecision, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& descriptor = operation(kPointwiseOperation);
      descriptor.set(cudnn_attribute::kPointwiseMath, math);
      descriptor.set(cudnn_attribute::kPointwiseX, a);
      if (b != nullptr) descriptor.set(cudnn_attribute::kPointwiseB, *b);
      descriptor.set(cudnn_attribute::kPointwiseY, y);
      descriptor.finalize();
    }
    // Reduces a over the axes of size 1 in y.
    void reduction(Reduction mode, const Descriptor& a, const Descriptor& y) {
      const int value = mode;
      Descriptor& math = add(kReduction);
      math.set(cudnn_attribute::kReductionMode, kTypeReduction, 1, &value);
      math.set(cudnn_attribute::kReductionType, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& descriptor = operation(kReductionOperation);
      descriptor.set(cudnn_attribute::kReductionX, a);
      descriptor.set(cudnn_attribute::kReductionY, y);
      descriptor.set(cudnn_attribute::kReductionMath, math);
      descriptor.finalize();
    }

   private:
    friend class Cudnn;

    Descriptor& add(int kind) {
      all_.push_back(std::make_unique<Descriptor>(kind));
      return *all_.back();
    }
    Descriptor& operation(int kind) {
      Descriptor& descriptor = add(kind);
      operations_.push_back(descriptor.get());
      return descriptor;
    }

    std::vector<std::unique_ptr<Descriptor>> all_;
    std::vector<void*> operations_;
    int64_t next_id_ = 1000;
    bool requires_float32_ = false;
  };

  // Returns the instance of the current device. Handles and plans belong to the device that is current at their
  // creation. Never destroyed: at process exit the library may already be unloaded.
  static Cudnn& instance() {
    static std::mutex mutex;
    static auto* const libraries = new std::map<int, Cudnn*>;
    std::lock_guard<std::mutex> lock(mutex);
    Cudnn*& library = (*libraries)[current_device()];
    if (library == nullptr) library = new Cudnn;
    return *library;
  }

  using Build = std::function<void(Graph&)>;

  // Whether cuDNN has at least `index` + 1 plans for the graph that `build` creates. The graph is cached under `key`,
  // and plans are created at first use.
  bool supports(const std::string& key, const Build& build, int index) {
    if (handle_ == nullptr) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return plan(key, build, index) != nullptr;
  }

  size_t workspace_bytes(const std::string& key, const Build& build, int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(plan(key, build, index)->workspace_bytes);
  }

  // Address of a tensor by id.
  struct Memory {
    int64_t id;
    const void* data;
  };

  const char* run(const std::string& key, const Build& build, int index, const std::vector<Memory>& tensors,
                  void* workspace, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<const void*> pointers;
    std::vector<int64_t> ids;
    for (const Memory& tensor : tensors) {
      if (tensor.data == nullptr) continue;
      pointers.push_back(tensor.data);
      ids.push_back(tensor.id);
    }
    Descriptor pack(kVariantPack);
    pack.set(cudnn_attribute::kPackPointers, kTypePointer, static_cast<int64_t>(pointers.size()), pointers.data());
    pack.set(cudnn_attribute::kPackIds, kTypeInt64, static_cast<int64_t>(ids.size()), ids.data());
    pack.set(cudnn_attribute::kPackWorkspace, kTypePointer, 1, &workspace);
    if (!pack.finalize()) return "cuDNN rejects the tensor addresses";
    if (set_stream_(handle_, stream) != 0) return "cuDNN rejects the stream";
    return execute_(handle_, plan(key, build, index)->plan->get(), pack.get()) == 0 ? nullptr
                                                                                    : "cuDNN rejects the plan";
  }

  static constexpr int kConvolution = 1;
  static constexpr int kTypeData = 1, kTypeBoolean = 2, kTypeInt64 = 3, kTypeFloat = 4, kTypeConvolutionMode = 7;
  static constexpr int kFloat = 0;
  static constexpr int kCrossCorrelation = 1;

 private:
  static constexpr int kPointwise = 0, kEngine = 2, kConfig = 3, kHeuristics = 4, kExecutionPlan = 5,
                       kConvolutionForward = 10, kPointwiseOperation = 13, kOperationGraph = 15, kVariantPack = 16,
                       kTensor = 17, kMatMul = 18, kMatMulOperation = 19, kReduction = 21, kReductionOperation = 22;
  static constexpr int kTypeHandle = 0, kTypePointer = 6, kTypeHeuristics = 8, kTypeNote = 11, kTypePointwise = 14,
                       kTypeDescriptor = 15, kTypeReduction = 18;
  static constexpr int kHalf = 2, kBFloat16 = 9;
  static constexpr int kHeuristicModeA = 3, kHeuristicFallback = 2;  // heuristics
  // cudnnBackendNumericalNote_t: notes up to kLastInexactNote mean lower precision (tensor cores, narrower types,
  // Fourier and Winograd transforms), except kNondeterministic.
  static constexpr int kNondeterministic = 4, kLastInexactNote = 8;
  static constexpr int kMaxProposals = 16;                      // proposals for a graph
  static constexpr int kNotes = 16;                             // of an engine, at most
  static constexpr int64_t kWorkspaceLimit = int64_t{1} << 30;  // bytes

  struct Plan {
    std::unique_ptr<Descriptor> plan;
    int64_t workspace_bytes = 0;
  };

  // Engine configurations that cuDNN proposes for a graph, best first, and the plans created from them.
  struct Proposals {
    Graph graph;
    std::unique_ptr<Descriptor> operations;
    std::vector<std::unique_ptr<Descriptor>> heuristics, configs;
    size_t next_config = 0;
    std::vector<Plan> plans;
  };

  Cudnn() {
    using platform::find;
    void* const library = platform::load_first(platform::kCudnn);
    if (library == nullptr) return;
    const bool count =
        find(library, "cudnnCreate", create_handle_) && find(library, "cudnnSetStream", set_stream_) &&
        find(library, "cudnnBackendCreateDescriptor", create_) &&
        find(library, "cudnnBackendDestroyDescriptor", destroy_) && find(library, "cudnnBackendSetAttribute", set_) &&
        find(library, "cudnnBackendGetAttribute", get_) && find(library, "cudnnBackendFinalize", finalize_) &&
        find(library, "cudnnBackendExecute", execute_);
    if (!count || create_handle_(&handle_) != 0) handle_ = nullptr;
  }

  // Returns plan `index` of the graph, or null.
  const Plan* plan(const std::string& key, const Build& build, int index) {
    std::unique_ptr<Proposals>& proposals = proposals_[key];
    if (proposals == nullptr) {
      proposals = std::make_unique<Proposals>();
      build(proposals->graph);
      request_proposals(*proposals);
    }
    while (index >= static_cast<int>(proposals->plans.size()) && proposals->next_config < proposals->configs.size()) {
      make_plan(*proposals, *proposals->configs[proposals->next_config++]);
    }
    return index < static_cast<int>(proposals->plans.size()) ? &proposals->plans[index] : nullptr;
  }

  void request_proposals(Proposals& proposals) {
    proposals.operations = std::make_unique<Descriptor>(kOperationGraph);
    proposals.operations->set(cudnn_attribute::kGraphOperations, kTypeDescriptor,
                              static_cast<int64_t>(proposals.graph.operations_.size()),
                              proposals.graph.operations_.data());
    proposals.operations->set(cudnn_attribute::kGraphHandle, kTypeHandle, 1, &handle_);
    if (!proposals.operations->finalize()) return;
    add_proposals(proposals, kHeuristicModeA);
    if (proposals.graph.requires_float32_)
      add_proposals(proposals, kHeuristicFallback);  // the proposals of mode A rarely have full precision
  }

  void add_proposals(Proposals& proposals, int heuristics) {
    proposals.heuristics.push_back(std::make_unique<Descriptor>(kHeuristics));
    Descriptor& heuristic = *proposals.heuristics.back();
    heuristic.set(cudnn_attribute::kHeuristicsGraph, *proposals.operations);
    heuristic.set(cudnn_attribute::kHeuristicsMode, kTypeHeuristics, 1, &heuristics);
    if (!heuristic.finalize()) return;
    std::vector<std::unique_ptr<Descriptor>> configs;
    std::vector<void*> handles;
    for (int i = 0; i < kMaxProposals; ++i) {
      configs.push_back(std::make_unique<Descriptor>(kConfig));
      handles.push_back(configs.back()->get());
    }
    int64_t count = 0;
    if (get_(heuristic.get(), cudnn_attribute::kHeuristicsResults, kTypeDescriptor, kMaxProposals, &count,
             handles.data()) != 0)
      return;
    for (int64_t i = 0; i < count && i < kMaxProposals; ++i) proposals.configs.push_back(std::move(configs[i]));
  }

  // Whether the numerical notes of the engine of `config` declare lower precision.
  bool is_inexact(const Descriptor& config) {
    Descriptor engine(kEngine);
    void* handle = engine.get();
    int64_t count = 0;
    if (get_(config.get(), cudnn_attribute::kConfigEngine, kTypeDescriptor, 1, &count, &handle) != 0) return true;
    int notes[kNotes];
    if (get_(handle, cudnn_attribute::kEngineNotes, kTypeNote, kNotes, &count, notes) != 0) return true;
    const auto is_exact = [](int note) { return note == kNondeterministic || note > kLastInexactNote; };
    return !std::all_of(notes, notes + count, is_exact);
  }

  void make_plan(Proposals& proposals, const Descriptor& config) {
    if (proposals.graph.requires_float32_ && is_inexact(config)) return;
    void* const handle = config.get();
    int64_t count = 0;
    Plan plan;
    plan.plan = std::make_unique<Descriptor>(kExecutionPlan);
    plan.plan->set(cudnn_attribute::kPlanHandle, kTypeHandle, 1, &handle_);
    plan.plan->set(cudnn_attribute::kPlanConfig, kTypeDescriptor, 1, &handle);
    if (!plan.plan->finalize()) return;
    if (get_(plan.plan->get(), cudnn_attribute::kPlanWorkspaceBytes, kTypeInt64, 1, &count, &plan.workspace_bytes) != 0)
      return;
    if (plan.workspace_bytes <= kWorkspaceLimit) proposals.plans.push_back(std::move(plan));
  }

  int (*create_handle_)(void** handle) = nullptr;
  int (*set_stream_)(void* handle, void* stream) = nullptr;
  int (*create_)(int kind, void** descriptor) = nullptr;
  int (*destroy_)(void* descriptor) = nullptr;
  int (*set_)(void* descriptor, int attribute, int type, int64_t count, const void* values) = nullptr;
  int (*get_)(void* descriptor, int attribute, int type, int64_t handles, int64_t* count, void* values) = nullptr;
  int (*finalize_)(void* descriptor) = nullptr;
  int (*execute_)(void* handle, void* plan, void* pack) = nullptr;
  void* handle_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Proposals>> proposals_;
};

}  // namespace sd_ort
