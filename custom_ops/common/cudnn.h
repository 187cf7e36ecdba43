// cuDNN's backend interface, found at run time: nothing here needs its headers or links to it, and without it nothing
// is proposed. A graph of operations becomes plans, one of which runs it. Plain C++; included by candidates.cc alone.
//
// Declarations and numbers follow NVIDIA's "cuDNN Backend API" (9.x; those used here are unchanged since 8.5).
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

// cudnnBackendAttributeName_t: CUDNN_ATTR_ and the name of the same number in tests/abi/cudnn.cc.
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
  // A backend descriptor; remembers whether everything asked of it went well.
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
    enum class Place { kMemory, kVirtual, kHost };  // a virtual tensor is in no memory; the host's is one float
    enum Pointwise { kAdd = 0, kMultiply = 1, kDivide = 6, kSubtract = 9, kExp = 13, kLog = 15 };
    enum Reduction { kSum = 0, kMaximum = 3 };
    using Sizes = std::vector<int64_t>;

    // No plans that compute in less than float32: TF32, Winograd's and Fourier transforms.
    void keep_float32() { keeps_float32_ = true; }

    // `id` names the tensor's memory in a run; virtual tensors get one.
    const Descriptor& tensor(int64_t id, DType type, const Sizes& sizes, const Sizes& strides,
                             Place place = Place::kMemory) {
      const int64_t alignment = 16, rank = static_cast<int64_t>(sizes.size());
      const int data = type == DType::kFloat32 ? kFloat : type == DType::kFloat16 ? kHalf : kBFloat16;
      const bool is_virtual = place == Place::kVirtual, on_host = place == Place::kHost;
      Descriptor& made = add(kTensor);
      made.set(cudnn_attribute::kTensorType, kTypeData, 1, &data);
      made.set(cudnn_attribute::kTensorSizes, kTypeInt64, rank, sizes.data());
      made.set(cudnn_attribute::kTensorStrides, kTypeInt64, rank, strides.data());
      made.set(cudnn_attribute::kTensorId, kTypeInt64, 1, &id);
      made.set(cudnn_attribute::kTensorAlignment, kTypeInt64, 1, &alignment);
      made.set(cudnn_attribute::kTensorIsVirtual, kTypeBoolean, 1, &is_virtual);
      if (on_host) made.set(cudnn_attribute::kTensorIsByValue, kTypeBoolean, 1, &on_host);
      made.finalize();
      return made;
    }
    const Descriptor& intermediate(const Sizes& sizes, const Sizes& strides, DType type = DType::kFloat32) {
      return tensor(next_id_++, type, sizes, strides, Place::kVirtual);
    }

    // y = convolution of x with filters; `description` is of kind kConvolution.
    Descriptor& description(int kind) { return add(kind); }
    void convolution(const Descriptor& description, const Descriptor& x, const Descriptor& filters,
                     const Descriptor& y) {
      const float one = 1.f, zero = 0.f;
      Descriptor& made = operation(kConvolutionForward);
      made.set(cudnn_attribute::kForwardAlpha, kTypeFloat, 1, &one);
      made.set(cudnn_attribute::kForwardBeta, kTypeFloat, 1, &zero);
      made.set(cudnn_attribute::kForwardConvolution, description);
      made.set(cudnn_attribute::kForwardFilters, filters);
      made.set(cudnn_attribute::kForwardX, x);
      made.set(cudnn_attribute::kForwardY, y);
      made.finalize();
    }
    // y = a b, products of the last two axes.
    void product(const Descriptor& a, const Descriptor& b, const Descriptor& y) {
      Descriptor& math = add(kProduct);
      math.set(cudnn_attribute::kMatMulType, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& made = operation(kProductOperation);
      made.set(cudnn_attribute::kMatMulA, a);
      made.set(cudnn_attribute::kMatMulB, b);
      made.set(cudnn_attribute::kMatMulC, y);
      made.set(cudnn_attribute::kMatMulMath, math);
      made.finalize();
    }
    // y = mode(a), or of a and b, which is broadcast.
    void pointwise(Pointwise mode, const Descriptor& a, const Descriptor* b, const Descriptor& y) {
      const int number = mode;
      Descriptor& math = add(kPointwise);
      math.set(cudnn_attribute::kPointwiseMode, kTypePointwise, 1, &number);
      math.set(cudnn_attribute::kPointwisePrecision, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& made = operation(kPointwiseOperation);
      made.set(cudnn_attribute::kPointwiseMath, math);
      made.set(cudnn_attribute::kPointwiseX, a);
      if (b != nullptr) made.set(cudnn_attribute::kPointwiseB, *b);
      made.set(cudnn_attribute::kPointwiseY, y);
      made.finalize();
    }
    // y: a reduced over the axes that are 1 in y.
    void reduction(Reduction mode, const Descriptor& a, const Descriptor& y) {
      const int number = mode;
      Descriptor& math = add(kReduction);
      math.set(cudnn_attribute::kReductionMode, kTypeReduction, 1, &number);
      math.set(cudnn_attribute::kReductionType, kTypeData, 1, &kFloat);
      math.finalize();
      Descriptor& made = operation(kReductionOperation);
      made.set(cudnn_attribute::kReductionX, a);
      made.set(cudnn_attribute::kReductionY, y);
      made.set(cudnn_attribute::kReductionMath, math);
      made.finalize();
    }

   private:
    friend class Cudnn;

    Descriptor& add(int kind) {
      all_.push_back(std::make_unique<Descriptor>(kind));
      return *all_.back();
    }
    Descriptor& operation(int kind) {
      Descriptor& made = add(kind);
      operations_.push_back(made.get());
      return made;
    }

    std::vector<std::unique_ptr<Descriptor>> all_;
    std::vector<void*> operations_;
    int64_t next_id_ = 1000;
    bool keeps_float32_ = false;
  };

  // That of the current device: a handle, and plans made with it, belong to the device which is current when they are
  // made. Never destroyed: at the process's end the library may be gone before this.
  static Cudnn& instance() {
    static std::mutex mutex;
    static auto* const libraries = new std::map<int, Cudnn*>;
    std::lock_guard<std::mutex> lock(mutex);
    Cudnn*& library = (*libraries)[current_device()];
    if (library == nullptr) library = new Cudnn;
    return *library;
  }

  using Build = std::function<void(Graph&)>;

  // Whether the library is here and proposes at least `number` + 1 plans for the graph that `build` makes. `key` names
  // the graph: one is built once, and each plan when it is first asked for.
  bool supports(const std::string& key, const Build& build, int number) {
    if (handle_ == nullptr) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return plan(key, build, number) != nullptr;
  }

  size_t workspace_bytes(const std::string& key, const Build& build, int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(plan(key, build, number)->workspace_bytes);
  }

  // A tensor's memory by its id.
  struct Memory {
    int64_t id;
    const void* data;
  };

  const char* run(const std::string& key, const Build& build, int number, const std::vector<Memory>& tensors,
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
    if (!pack.finalize()) return "cuDNN refuses the call's memory";
    if (set_stream_(handle_, stream) != 0) return "cuDNN refuses the stream";
    return execute_(handle_, plan(key, build, number)->plan->get(), pack.get()) == 0 ? nullptr
                                                                                     : "cuDNN refuses the call";
  }

  static constexpr int kConvolution = 1;
  static constexpr int kTypeData = 1, kTypeBoolean = 2, kTypeInt64 = 3, kTypeFloat = 4, kTypeConvolutionMode = 7;
  static constexpr int kFloat = 0;
  static constexpr int kCrossCorrelation = 1;

 private:
  static constexpr int kPointwise = 0, kEngine = 2, kConfig = 3, kHeuristics = 4, kExecutionPlan = 5,
                       kConvolutionForward = 10, kPointwiseOperation = 13, kOperationGraph = 15, kVariantPack = 16,
                       kTensor = 17, kProduct = 18, kProductOperation = 19, kReduction = 21, kReductionOperation = 22;
  static constexpr int kTypeHandle = 0, kTypePointer = 6, kTypeHeuristics = 8, kTypeNote = 11, kTypePointwise = 14,
                       kTypeDescriptor = 15, kTypeReduction = 18;
  static constexpr int kHalf = 2, kBFloat16 = 9;
  static constexpr int kByItsModel = 3, kFallbacks = 2;  // heuristics
  // cudnnBackendNumericalNote_t: up to kLastInexactNote, tensor cores, operands or sums of fewer bits, Fourier
  // transforms and Winograd's; but for kNondeterministic.
  static constexpr int kNondeterministic = 4, kLastInexactNote = 8;
  static constexpr int kWanted = 16;                            // proposals for a graph
  static constexpr int kNotes = 16;                             // of an engine, at most
  static constexpr int64_t kWorkspaceLimit = int64_t{1} << 30;  // bytes

  struct Plan {
    std::unique_ptr<Descriptor> plan;
    int64_t workspace_bytes = 0;
  };

  // What cuDNN proposes for a graph, best first, and how many of the proposals were made plans or dropped.
  struct Proposals {
    Graph graph;
    std::unique_ptr<Descriptor> operations;
    std::vector<std::unique_ptr<Descriptor>> heuristics, configs;
    size_t tried = 0;
    std::vector<Plan> plans;
  };

  Cudnn() {
    using platform::find;
    void* const library = platform::load_first(platform::kCudnn);
    if (library == nullptr) return;
    const bool found =
        find(library, "cudnnCreate", create_handle_) && find(library, "cudnnSetStream", set_stream_) &&
        find(library, "cudnnBackendCreateDescriptor", create_) &&
        find(library, "cudnnBackendDestroyDescriptor", destroy_) && find(library, "cudnnBackendSetAttribute", set_) &&
        find(library, "cudnnBackendGetAttribute", get_) && find(library, "cudnnBackendFinalize", finalize_) &&
        find(library, "cudnnBackendExecute", execute_);
    if (!found || create_handle_(&handle_) != 0) handle_ = nullptr;
  }

  // Plan `number` of the graph, or null.
  const Plan* plan(const std::string& key, const Build& build, int number) {
    std::unique_ptr<Proposals>& known = proposals_[key];
    if (known == nullptr) {
      known = std::make_unique<Proposals>();
      build(known->graph);
      ask(*known);
    }
    while (number >= static_cast<int>(known->plans.size()) && known->tried < known->configs.size()) {
      make_plan(*known, *known->configs[known->tried++]);
    }
    return number < static_cast<int>(known->plans.size()) ? &known->plans[number] : nullptr;
  }

  void ask(Proposals& made) {
    made.operations = std::make_unique<Descriptor>(kOperationGraph);
    made.operations->set(cudnn_attribute::kGraphOperations, kTypeDescriptor,
                         static_cast<int64_t>(made.graph.operations_.size()), made.graph.operations_.data());
    made.operations->set(cudnn_attribute::kGraphHandle, kTypeHandle, 1, &handle_);
    if (!made.operations->finalize()) return;
    consider(made, kByItsModel);
    if (made.graph.keeps_float32_) consider(made, kFallbacks);  // the others are fast, and hardly ever exact
  }

  void consider(Proposals& made, int heuristics) {
    made.heuristics.push_back(std::make_unique<Descriptor>(kHeuristics));
    Descriptor& asked = *made.heuristics.back();
    asked.set(cudnn_attribute::kHeuristicsGraph, *made.operations);
    asked.set(cudnn_attribute::kHeuristicsMode, kTypeHeuristics, 1, &heuristics);
    if (!asked.finalize()) return;
    std::vector<std::unique_ptr<Descriptor>> configs;
    std::vector<void*> wanted;
    for (int i = 0; i < kWanted; ++i) {
      configs.push_back(std::make_unique<Descriptor>(kConfig));
      wanted.push_back(configs.back()->get());
    }
    int64_t count = 0;
    if (get_(asked.get(), cudnn_attribute::kHeuristicsResults, kTypeDescriptor, kWanted, &count, wanted.data()) != 0)
      return;
    for (int64_t i = 0; i < count && i < kWanted; ++i) made.configs.push_back(std::move(configs[i]));
  }

  // Whether the engine of `config` says that it is no plain arithmetic of the operands' type.
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
    if (proposals.graph.keeps_float32_ && is_inexact(config)) return;
    void* const handle = config.get();
    int64_t found = 0;
    Plan made;
    made.plan = std::make_unique<Descriptor>(kExecutionPlan);
    made.plan->set(cudnn_attribute::kPlanHandle, kTypeHandle, 1, &handle_);
    made.plan->set(cudnn_attribute::kPlanConfig, kTypeDescriptor, 1, &handle);
    if (!made.plan->finalize()) return;
    if (get_(made.plan->get(), cudnn_attribute::kPlanWorkspaceBytes, kTypeInt64, 1, &found, &made.workspace_bytes) != 0)
      return;
    if (made.workspace_bytes <= kWorkspaceLimit) proposals.plans.push_back(std::move(made));
  }

  int (*create_handle_)(void** handle) = nullptr;
  int (*set_stream_)(void* handle, void* stream) = nullptr;
  int (*create_)(int kind, void** descriptor) = nullptr;
  int (*destroy_)(void* descriptor) = nullptr;
  int (*set_)(void* descriptor, int attribute, int type, int64_t count, const void* values) = nullptr;
  int (*get_)(void* descriptor, int attribute, int type, int64_t wanted, int64_t* count, void* values) = nullptr;
  int (*finalize_)(void* descriptor) = nullptr;
  int (*execute_)(void* handle, void* plan, void* pack) = nullptr;
  void* handle_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Proposals>> proposals_;
};

}  // namespace sd_ort
