// Convolutions by cuDNN, found at run time: nothing here needs its headers or links to it, and without it `supports`
// says no. Included by candidates.cc alone; plain C++.
//
// Declarations and numbers follow NVIDIA's "cuDNN Backend API" (9.x; those used here are unchanged since 8.5).
#pragma once

#include <dlfcn.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nhwc_conv/op.h"

namespace sd_ort {

class Cudnn {
 public:
  static Cudnn& instance() {
    static Cudnn library;
    return library;
  }

  // Whether the library is here and proposes at least `number` + 1 plans for convolutions of this shape.
  bool supports(const NhwcConvParams& p, int number) {
    if (!aligned(p)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return number < static_cast<int>(plans(p).size());
  }

  size_t workspace_bytes(const NhwcConvParams& p, int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(plans(p)[number].workspace_bytes);
  }

  const char* run(const NhwcConvParams& p, int number, void* workspace, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Plan& plan = plans(p)[number];
    const void* pointers[] = {p.x, p.filters, p.y, p.bias, p.skip};
    const int64_t ids[] = {kX, kFilters, kY, kBias, kSkip};
    std::vector<const void*> given;
    std::vector<int64_t> names;
    for (int i = 0; i < 5; ++i) {
      if (pointers[i] == nullptr) continue;
      given.push_back(pointers[i]);
      names.push_back(ids[i]);
    }
    Descriptor pack(*this, kVariantPack);
    pack.set(kPackPointers, kTypePointer, static_cast<int64_t>(given.size()), given.data());
    pack.set(kPackIds, kTypeInt64, static_cast<int64_t>(names.size()), names.data());
    pack.set(kPackWorkspace, kTypePointer, 1, &workspace);
    if (!pack.finalize()) return "cuDNN refuses the convolution's buffers";
    if (set_stream_(handle_, stream) != 0) return "cuDNN refuses the stream";
    return execute_(handle_, plan.plan->get(), pack.get()) == 0 ? nullptr : "cuDNN refuses the convolution";
  }

 private:
  static constexpr int kPointwise = 0, kConvolution = 1, kHeuristics = 4, kExecutionPlan = 5, kConvolutionForward = 10,
                       kPointwiseOperation = 13, kOperationGraph = 15, kVariantPack = 16, kTensor = 17, kConfig = 3;
  static constexpr int kTypeHandle = 0, kTypeData = 1, kTypeBoolean = 2, kTypeInt64 = 3, kTypeFloat = 4,
                       kTypePointer = 6, kTypeConvolutionMode = 7, kTypeHeuristics = 8, kTypePointwise = 14,
                       kTypeDescriptor = 15;
  static constexpr int kPackIds = 1000, kPackPointers = 1001, kPackWorkspace = 1003;
  static constexpr int kFloat = 0, kHalf = 2, kBFloat16 = 9;
  static constexpr int64_t kX = 1, kFilters = 2, kY = 3, kBias = 4, kSkip = 5, kProduct = 6, kBiased = 7;
  static constexpr int kWanted = 8;                             // plans a shape
  static constexpr int64_t kWorkspaceLimit = int64_t{1} << 30;  // bytes

  // A backend descriptor; remembers whether everything asked of it went well.
  class Descriptor {
   public:
    Descriptor(Cudnn& library, int kind) : library_(library) { ok_ = library_.create_(kind, &handle_) == 0; }
    ~Descriptor() {
      if (handle_ != nullptr) library_.destroy_(handle_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    void set(int attribute, int type, int64_t count, const void* values) {
      ok_ = ok_ && library_.set_(handle_, attribute, type, count, values) == 0;
    }
    void set(int attribute, const Descriptor& value) {
      ok_ = ok_ && value.ok_;
      void* handle = value.handle_;
      set(attribute, kTypeDescriptor, 1, &handle);
    }
    bool finalize() { return ok_ = ok_ && library_.finalize_(handle_) == 0; }
    void* get() const { return handle_; }

   private:
    Cudnn& library_;
    void* handle_ = nullptr;
    bool ok_ = false;
  };
  using Owned = std::unique_ptr<Descriptor>;

  struct Plan {
    Owned plan;
    int64_t workspace_bytes = 0;
  };

  Cudnn() {
    void* library = nullptr;
    for (const char* name : {"libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return;
    int (*create_handle)(void**) = nullptr;
    const bool found =
        find(library, "cudnnCreate", create_handle) && find(library, "cudnnSetStream", set_stream_) &&
        find(library, "cudnnBackendCreateDescriptor", create_) &&
        find(library, "cudnnBackendDestroyDescriptor", destroy_) && find(library, "cudnnBackendSetAttribute", set_) &&
        find(library, "cudnnBackendGetAttribute", get_) && find(library, "cudnnBackendFinalize", finalize_) &&
        find(library, "cudnnBackendExecute", execute_);
    if (!found || create_handle(&handle_) != 0) handle_ = nullptr;
  }

  template <class Function>
  static bool find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    return function != nullptr;
  }

  static bool aligned(const NhwcConvParams& p) {
    for (const void* pointer : {p.x, p.filters, p.bias, p.skip, static_cast<const void*>(p.y)}) {
      if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
    }
    return true;
  }

  // What cuDNN proposes for a shape, asked once.
  const std::vector<Plan>& plans(const NhwcConvParams& p) {
    std::unique_ptr<std::vector<Plan>>& made = plans_[p.signature()];
    if (made == nullptr) {
      made = std::make_unique<std::vector<Plan>>();
      if (handle_ != nullptr) ask(p, *made);
    }
    return *made;
  }

  static int type_of(const NhwcConvParams& p) {
    return p.dtype == DType::kFloat32 ? kFloat : p.dtype == DType::kFloat16 ? kHalf : kBFloat16;
  }

  // Sizes (N, C, H, W) of a tensor whose elements lie as (N, H, W, C). A virtual one is in no memory, and float32.
  Owned tensor(int64_t id, int type, std::array<int64_t, 4> sizes, bool is_virtual = false) {
    const int64_t alignment = 16, strides[] = {sizes[1] * sizes[2] * sizes[3], 1, sizes[3] * sizes[1], sizes[1]};
    auto made = std::make_unique<Descriptor>(*this, kTensor);
    const int data = is_virtual ? kFloat : type;
    made->set(901, kTypeData, 1, &data);
    made->set(902, kTypeInt64, 4, sizes.data());
    made->set(903, kTypeInt64, 4, strides);
    made->set(906, kTypeInt64, 1, &id);
    made->set(900, kTypeInt64, 1, &alignment);
    made->set(907, kTypeBoolean, 1, &is_virtual);
    made->finalize();
    return made;
  }

  Owned convolution(const NhwcConvParams& p) {
    const int math = kFloat, cross_correlation = 1;
    const int64_t axes = 2, dilations[] = {p.dilation_height, p.dilation_width},
                  strides[] = {p.stride_height, p.stride_width}, before[] = {p.pad_top, p.pad_left},
                  after[] = {p.pad_bottom, p.pad_right};
    auto made = std::make_unique<Descriptor>(*this, kConvolution);
    made->set(100, kTypeData, 1, &math);
    made->set(101, kTypeConvolutionMode, 1, &cross_correlation);
    made->set(102, kTypeInt64, 2, dilations);
    made->set(103, kTypeInt64, 2, strides);
    made->set(104, kTypeInt64, 2, after);
    made->set(105, kTypeInt64, 2, before);
    made->set(106, kTypeInt64, 1, &axes);
    made->finalize();
    return made;
  }

  // The operation y = a + b.
  Owned sum(const Descriptor& add, const Descriptor& a, const Descriptor& b, const Descriptor& y) {
    auto made = std::make_unique<Descriptor>(*this, kPointwiseOperation);
    made->set(750, add);
    made->set(751, a);
    made->set(752, b);
    made->set(753, y);
    made->finalize();
    return made;
  }

  void ask(const NhwcConvParams& p, std::vector<Plan>& plans) {
    const std::array<int64_t, 4> out = {p.batch, p.filter_count, p.out_height, p.out_width};
    const int type = type_of(p), math = kFloat, mode = 0;  // CUDNN_POINTWISE_ADD
    const Owned x = tensor(kX, type, {p.batch, p.channels, p.height, p.width});
    const Owned filters =
        tensor(kFilters, type, {p.filter_count, p.channels / p.groups, p.kernel_height, p.kernel_width});
    const Owned y = tensor(kY, type, out);
    const Owned bias = tensor(kBias, type, {1, p.filter_count, 1, 1}), skip = tensor(kSkip, type, out);
    const Owned product = tensor(kProduct, type, out, true), biased = tensor(kBiased, type, out, true);
    const Owned convolved = convolution(p);
    Descriptor add(*this, kPointwise);
    add.set(0, kTypePointwise, 1, &mode);
    add.set(1, kTypeData, 1, &math);
    add.finalize();

    const float one = 1.f, zero = 0.f;
    const bool has_bias = p.bias != nullptr, has_skip = p.skip != nullptr;
    auto first = std::make_unique<Descriptor>(*this, kConvolutionForward);
    first->set(700, kTypeFloat, 1, &one);
    first->set(701, kTypeFloat, 1, &zero);
    first->set(702, *convolved);
    first->set(703, *filters);
    first->set(704, *x);
    first->set(705, has_bias || has_skip ? *product : *y);
    first->finalize();
    std::vector<Owned> operations;
    operations.push_back(std::move(first));
    if (has_bias) operations.push_back(sum(add, *product, *bias, has_skip ? *biased : *y));
    if (has_skip) operations.push_back(sum(add, has_bias ? *biased : *product, *skip, *y));
    propose(operations, plans);
  }

  void propose(const std::vector<Owned>& operations, std::vector<Plan>& plans) {
    std::vector<void*> handles;
    for (const Owned& operation : operations) handles.push_back(operation->get());
    Descriptor graph(*this, kOperationGraph);
    graph.set(801, kTypeDescriptor, static_cast<int64_t>(handles.size()), handles.data());
    graph.set(800, kTypeHandle, 1, &handle_);
    if (!graph.finalize()) return;
    const int mode_a = 3;
    Descriptor heuristics(*this, kHeuristics);
    heuristics.set(201, graph);
    heuristics.set(200, kTypeHeuristics, 1, &mode_a);
    if (!heuristics.finalize()) return;
    std::vector<Owned> configs;
    std::vector<void*> wanted;
    for (int i = 0; i < 2 * kWanted; ++i) {
      configs.push_back(std::make_unique<Descriptor>(*this, kConfig));
      wanted.push_back(configs.back()->get());
    }
    int64_t count = 0;
    if (get_(heuristics.get(), 202, kTypeDescriptor, 2 * kWanted, &count, wanted.data()) != 0) return;
    for (int64_t i = 0; i < count && i < 2 * kWanted && static_cast<int>(plans.size()) < kWanted; ++i) {
      Plan made;
      made.plan = std::make_unique<Descriptor>(*this, kExecutionPlan);
      made.plan->set(400, kTypeHandle, 1, &handle_);
      made.plan->set(401, kTypeDescriptor, 1, &wanted[i]);
      if (!made.plan->finalize()) continue;
      int64_t found = 0;
      if (get_(made.plan->get(), 402, kTypeInt64, 1, &found, &made.workspace_bytes) != 0) continue;
      if (made.workspace_bytes <= kWorkspaceLimit) plans.push_back(std::move(made));
    }
  }

  int (*set_stream_)(void* handle, void* stream) = nullptr;
  int (*create_)(int kind, void** descriptor) = nullptr;
  int (*destroy_)(void* descriptor) = nullptr;
  int (*set_)(void* descriptor, int attribute, int type, int64_t count, const void* values) = nullptr;
  int (*get_)(void* descriptor, int attribute, int type, int64_t wanted, int64_t* count, void* values) = nullptr;
  int (*finalize_)(void* descriptor) = nullptr;
  int (*execute_)(void* handle, void* plan, void* pack) = nullptr;
  void* handle_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<std::vector<Plan>>> plans_;
};

}  // namespace sd_ort
