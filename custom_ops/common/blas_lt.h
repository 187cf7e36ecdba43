// Matrix products with bias and residual by cuBLASLt or hipBLASLt, found at run time: nothing here needs their headers
// or links to them, and without them `supports` says no. Included by candidates.cc files alone; plain C++.
//
// The C interfaces of the two have the same functions and differ in a few numbers; the declarations follow NVIDIA's
// "cuBLASLt API Reference" (13.0; unchanged since 11) and AMD's "hipBLASLt API Reference" (1.0).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/capture.h"
#include "common/op.h"
#include "common/platform.h"
#include "common/tuner.h"
#include "common/vendors/which.h"

namespace sd_ort {

class BlasLt {
  friend struct BlasLtAssertions;  // tests/abi

 public:
  // Y = scale X W + bias + skip, row-major: X (rows, inner), W (inner, columns), bias (columns) or null, skip as Y or
  // null. `transposed`: W is given as (columns, inner). Strides are elements from a row to the next, 0 for contiguous
  // ones; Y and skip share theirs. `float32_y`: Y is float32 whatever X and W are. `batch`: as many products of
  // matrices that lie behind each other, contiguous ones, without bias and skip.
  struct Product {
    DType dtype;
    const void* x;
    const void* weight;
    const void* bias;
    const void* skip;
    void* y;
    int64_t rows;
    int64_t inner;
    int64_t columns;
    bool transposed = false;
    bool float32_y = false;
    int64_t x_stride = 0;
    int64_t weight_stride = 0;
    int64_t y_stride = 0;
    float scale = 1.f;
    int32_t batch = 1;
  };

  // That of the current device: a handle belongs to the device which is current when it is made.
  static BlasLt& instance() {
    static std::mutex mutex;
    static std::map<int, BlasLt*> libraries;
    return *once(mutex, libraries, current_device(), [] { return new BlasLt; });
  }

  // The library's name where it does not load, else null. Asks no device.
  static const char* missing() { return load() == nullptr ? kLibraries[0] : nullptr; }

  // Whether the library is here and proposes at least `number` + 1 algorithms for products of this shape.
  bool supports(const Product& product, int number) {
    if (product.rows == 0 || product.inner == 0 || product.columns == 0 || !aligned(product)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return number < static_cast<int>(plan(product).algorithms.size());
  }

  size_t workspace_bytes(const Product& product, int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return plan(product).algorithms[number].workspace_bytes;
  }

  const char* run(const Product& product, int number, void* workspace, void* stream) {
    void* const handle = handle_for(stream);
    if (handle == nullptr) return "the BLAS library gives no handle for the stream";
    std::lock_guard<std::mutex> lock(mutex_);
    Plan& p = plan(product);
    if (product.bias != nullptr) {
      set_attribute_(p.product, kBiasPointer, &product.bias, sizeof(product.bias));
    }
    const float beta = product.skip == nullptr ? 0.f : 1.f;
    // Column-major as the library is: Y^T = W^T X^T.
    const int status = multiply_(handle, p.product, &product.scale, product.weight, p.weight, product.x, p.x, &beta,
                                 product.skip == nullptr ? product.y : product.skip, p.y, product.y, p.y,
                                 &p.algorithms[number], workspace, p.algorithms[number].workspace_bytes, stream);
    return status == 0 ? nullptr : "the BLAS library refuses the product";
  }

 private:
#if SD_ORT_HIP
  static constexpr const char* kPrefix = "hipblasLt";
  static constexpr auto& kLibraries = platform::kHipblasLt;
  static constexpr int kCompute = 2;       // HIPBLAS_COMPUTE_32F
  static constexpr int kTransposed = 112;  // HIPBLAS_OP_T
  static constexpr int kTransposeWeight = 0, kEpilogue = 2, kBiasPointer = 3;
  static constexpr int kBatchCount = 0, kBatchStride = 1;
  static constexpr size_t kAlgorithmBytes = 24;  // hipblasLtMatmulAlgo_t: uint8_t[16], size_t
  static constexpr bool kAsksAlignment = false;
  // Products that split their inner dimension add up in a buffer of the handle: two streams must not share it.
  static constexpr bool kHandlePerStream = true;
  // If there are fewer than that, hipBLASLt goes through all its solutions, and loads their files.
  static constexpr int kWanted = 8;
#else
  static constexpr const char* kPrefix = "cublasLt";
  static constexpr auto& kLibraries = platform::kCublasLt;
  static constexpr int kCompute = 68;    // CUBLAS_COMPUTE_32F
  static constexpr int kTransposed = 1;  // CUBLAS_OP_T
  static constexpr int kTransposeWeight = 3, kEpilogue = 7, kBiasPointer = 8;
  static constexpr int kBatchCount = 5, kBatchStride = 6;
  static constexpr size_t kAlgorithmBytes = 64;
  static constexpr bool kAsksAlignment = true;
  static constexpr bool kHandlePerStream = false;  // the workspace of a call is all that a product writes beside Y
  static constexpr int kWanted = 16;
#endif
  static constexpr int kEpilogueBias = 4, kMaxWorkspace = 1, kFirstAlignment = 5, kLastAlignment = 8;
  static constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14;  // cudaDataType_t and hipDataType
  static constexpr uint64_t kWorkspaceLimit = 32 << 20;
  static constexpr uint32_t kAlignment = 16;

  // cublasLtMatmulHeuristicResult_t or hipblasLtMatmulHeuristicResult_t; begins with the algorithm, as `multiply_`
  // takes it.
  struct Algorithm {
    alignas(8) unsigned char bytes[kAlgorithmBytes];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
  };

  struct Plan {
    void* product = nullptr;
    void* x = nullptr;
    void* weight = nullptr;
    void* y = nullptr;
    std::vector<Algorithm> algorithms;
  };

  BlasLt() {
    void* const library = load();
    if (library == nullptr) return;
    const bool found = find(library, "Create", create_) && find(library, "MatmulDescCreate", create_product_) &&
                       find(library, "MatmulDescSetAttribute", set_attribute_) &&
                       find(library, "MatrixLayoutCreate", create_layout_) &&
                       find(library, "MatrixLayoutSetAttribute", set_layout_) &&
                       find(library, "MatmulPreferenceCreate", create_preference_) &&
                       find(library, "MatmulPreferenceSetAttribute", set_preference_) &&
                       find(library, "MatmulAlgoGetHeuristic", propose_) && find(library, "Matmul", multiply_);
    if (found) handle_ = create_handle();
  }

  // The library, or null: also if SD_ORT_WITHOUT_BLAS is set, as by code_objects/recorded.py, whose addresses lead
  // nowhere and whose HIP runtime has no device.
  static void* load() {
    return std::getenv("SD_ORT_WITHOUT_BLAS") == nullptr ? platform::load_first(kLibraries) : nullptr;
  }

  // The entry of `key`; if there is none, made by `make`, which has the library allocate and clear memory of the
  // device: while no other thread captures, and without the mutex until then, which a capture needs.
  template <class Key, class Value, class Make>
  static Value* once(std::mutex& mutex, std::map<Key, Value*>& entries, Key key, const Make& make) {
    Value* entry = nullptr;
    const auto find = [&](const auto& otherwise) {
      std::lock_guard<std::mutex> lock(mutex);
      Value*& found = entries[key];
      if (found == nullptr) found = otherwise();
      entry = found;
    };
    find([]() -> Value* { return nullptr; });
    if (entry == nullptr) Captures::instance().run_without([&] { find(make); });
    return entry;
  }

  // The handle that multiplies in a stream, or null. An algorithm that one handle proposed is taken by all of a device.
  void* handle_for(void* stream) {
    if (!kHandlePerStream || handle_ == nullptr) return handle_;
    return once(mutex_, stream_handles_, stream, [this] { return create_handle(); });
  }

  void* create_handle() const {
    void* handle = nullptr;
    return create_(&handle) == 0 ? handle : nullptr;
  }

  template <class Function>
  static bool find(void* library, const char* name, Function*& function) {
    return platform::find(library, std::string(kPrefix) + name, function);
  }

  static bool aligned(const Product& p) {
    for (const void* pointer : {p.x, p.weight, p.bias, p.skip, static_cast<const void*>(p.y)}) {
      if (reinterpret_cast<uintptr_t>(pointer) % kAlignment != 0) return false;
    }
    return true;
  }

  static int64_t stride(int64_t given, int64_t contiguous) { return given == 0 ? contiguous : given; }

  // What the library proposes for a shape, asked once; no algorithms when it is missing or refuses.
  Plan& plan(const Product& p) {
    const std::vector<int64_t> key = {static_cast<int64_t>(p.dtype),
                                      p.rows,
                                      p.inner,
                                      p.columns,
                                      p.bias != nullptr,
                                      p.transposed,
                                      p.skip != nullptr,
                                      p.float32_y,
                                      p.x_stride,
                                      p.y_stride,
                                      p.weight_stride,
                                      p.batch};
    std::unique_ptr<Plan>& made = plans_[key];
    if (made == nullptr) {
      made = std::make_unique<Plan>();
      if (handle_ != nullptr) ask(p, *made);
    }
    return *made;
  }

  void ask(const Product& p, Plan& plan) {
    const int type = p.dtype == DType::kFloat32 ? kFloat32 : p.dtype == DType::kFloat16 ? kFloat16 : kBFloat16;
    void* preference = nullptr;
    int status = create_product_(&plan.product, kCompute, kFloat32);
    if (status == 0 && p.bias != nullptr) {
      status = set_attribute_(plan.product, kEpilogue, &kEpilogueBias, sizeof(kEpilogueBias));
      if (status == 0) status = set_attribute_(plan.product, kBiasPointer, &p.bias, sizeof(p.bias));
    }
    if (status == 0 && p.transposed) {
      status = set_attribute_(plan.product, kTransposeWeight, &kTransposed, sizeof(kTransposed));
    }
    const int64_t inner = p.transposed ? p.columns : p.inner, columns = p.transposed ? p.inner : p.columns;
    if (status == 0) status = create_layout_(&plan.weight, type, columns, inner, stride(p.weight_stride, columns));
    if (status == 0) status = create_layout_(&plan.x, type, p.inner, p.rows, stride(p.x_stride, p.inner));
    const int y_type = p.float32_y ? kFloat32 : type;
    if (status == 0) status = create_layout_(&plan.y, y_type, p.columns, p.rows, stride(p.y_stride, p.columns));
    if (status == 0 && p.batch > 1) status = set_batch(plan.weight, p.batch, p.inner * p.columns);
    if (status == 0 && p.batch > 1) status = set_batch(plan.x, p.batch, p.rows * p.inner);
    if (status == 0 && p.batch > 1) status = set_batch(plan.y, p.batch, p.rows * p.columns);
    if (status == 0) status = create_preference_(&preference);
    if (status == 0) status = set_preference_(preference, kMaxWorkspace, &kWorkspaceLimit, sizeof(kWorkspaceLimit));
    for (int which = kFirstAlignment; kAsksAlignment && status == 0 && which <= kLastAlignment; ++which) {
      status = set_preference_(preference, which, &kAlignment, sizeof(kAlignment));
    }
    if (status != 0) return;
    std::vector<Algorithm> proposed(kWanted);
    int count = 0;
    status = propose_(handle_, plan.product, plan.weight, plan.x, plan.y, plan.y, preference, kWanted, proposed.data(),
                      &count);
    for (int i = 0; status == 0 && i < count; ++i) {
      if (proposed[i].status == 0) plan.algorithms.push_back(proposed[i]);
    }
  }

  int set_batch(void* layout, int32_t count, int64_t stride) {
    const int status = set_layout_(layout, kBatchCount, &count, sizeof(count));
    return status == 0 ? set_layout_(layout, kBatchStride, &stride, sizeof(stride)) : status;
  }

  int (*create_)(void** handle) = nullptr;
  int (*create_product_)(void** product, int compute, int scale) = nullptr;
  int (*set_attribute_)(void* product, int attribute, const void* value, size_t bytes) = nullptr;
  int (*create_layout_)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*set_layout_)(void* layout, int attribute, const void* value, size_t bytes) = nullptr;
  int (*create_preference_)(void** preference) = nullptr;
  int (*set_preference_)(void* preference, int attribute, const void* value, size_t bytes) = nullptr;
  int (*propose_)(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference, int wanted,
                  Algorithm* proposed, int* count) = nullptr;
  int (*multiply_)(void* handle, void* product, const void* alpha, const void* a, void* a_layout, const void* b,
                   void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) = nullptr;
  void* handle_ = nullptr;  // for questions; where streams may share one, for products too
  std::mutex mutex_;
  std::map<void*, void*> stream_handles_;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
};

}  // namespace sd_ort
