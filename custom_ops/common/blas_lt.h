// GEMM with bias and residual by cuBLASLt or hipBLASLt, loaded at run time without their headers. Without the library,
// supports() returns false. Included by candidates.cc files alone; plain C++.
//
// Both C interfaces have the same functions and differ in a few constants. The declarations follow NVIDIA's
// "cuBLASLt API Reference" (13.0; unchanged since 11) and AMD's "hipBLASLt API Reference" (1.0).
#pragma get_or_create

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/capture.h"
#include "common/op.h"
#include "common/platform.h"
#include "common/tunable.h"
#include "common/tuner.h"
#include "common/vendors/which.h"

namespace sd_ort {

class BlasLt {
  friend struct BlasLtAssertions;  // tests/abi

 public:
  // Y = scale X W + bias + skip, row-major: X (rows, inner), W (inner, columns), bias (columns) or null, skip like Y or
  // null. `transposed`: W is (columns, inner). Strides are in elements between rows, 0 if contiguous; Y and skip share
  // theirs. `float32_y`: Y is float32 for any dtype. `batch`: number of contiguous matrices, without bias and skip.
  // `gelu`: Y is GELU of the sum, by tanh. `float8`: X and W are e4m3 as the device's units read it, `dtype` is that of
  // bias, skip and Y, W is transposed, and the product is multiplied by the number at device address `weight_scale`.
  // `y_factor`: device address of a number that Y is multiplied by, and written in float8 (OCP's); or null.
  enum class Float8 : int32_t { kNone, kOcp, kFnuz };
  struct Gemm {
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
    bool gelu = false;
    Float8 float8 = Float8::kNone;
    const float* weight_scale = nullptr;
    const float* y_factor = nullptr;
  };

  // Returns the instance of the current device. A handle belongs to the device that is current at its creation.
  static BlasLt& instance() {
    static std::mutex mutex;
    static std::map<int, BlasLt*> libraries;
    return *get_or_create(mutex, libraries, current_device(), [] { return new BlasLt; });
  }

  // Returns the file name of the library if it cannot be loaded, else null. Uses no device.
  static const char* missing() { return load_library() == nullptr ? kLibraries[0] : nullptr; }

  // Whether the library is loaded and proposes at least `index` + 1 algorithms for this shape.
  bool supports(const Gemm& gemm, int index) {
    if (gemm.rows == 0 || gemm.inner == 0 || gemm.columns == 0 || !aligned(gemm)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return index < static_cast<int>(problem(gemm).algorithms.size());
  }

  size_t workspace_bytes(const Gemm& gemm, int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return problem(gemm).algorithms[index].workspace_bytes;
  }

  const char* run(const Gemm& gemm, int index, void* workspace, void* stream) {
    void* const handle = handle_for(stream);
    if (handle == nullptr) return "the BLAS library creates no handle for the stream";
    std::lock_guard<std::mutex> lock(mutex_);
    Problem& p = problem(gemm);
    if (gemm.bias != nullptr) {
      set_attribute_(p.description, kBiasPointer, &gemm.bias, sizeof(gemm.bias));
    }
    float scale = gemm.scale;
    if (gemm.float8 != Float8::kNone) {
      set_attribute_(p.description, kWeightScale, &gemm.weight_scale, sizeof(gemm.weight_scale));
      if (gemm.y_factor != nullptr) set_attribute_(p.description, kYFactor, &gemm.y_factor, sizeof(gemm.y_factor));
      if (gemm.float8 == Float8::kFnuz) scale *= 4.f;  // the same bits are half of the value in X and in W
    }
    const float beta = gemm.skip == nullptr ? 0.f : 1.f;
    const void* const in_place = gemm.y_factor == nullptr ? gemm.y : nullptr;  // Y in float8 is not of the skip's type
    // The library is column-major: Y^T = W^T X^T.
    const int status = matmul_(handle, p.description, &scale, gemm.weight, p.weight, gemm.x, p.x, &beta,
                               gemm.skip == nullptr ? in_place : gemm.skip, p.skip, gemm.y, p.y, &p.algorithms[index],
                               workspace, p.algorithms[index].workspace_bytes, stream);
    return status == 0 ? nullptr : "the BLAS library rejects the GEMM";
  }

 private:
#if SD_ORT_HIP
  static constexpr const char* kPrefix = "hipblasLt";
  static constexpr auto& kLibraries = platform::kHipblasLt;
  static constexpr int kCompute = 2;       // HIPBLAS_COMPUTE_32F
  static constexpr int kTransposed = 112;  // HIPBLAS_OP_T
  static constexpr int kTransposeWeight = 0, kEpilogue = 2, kBiasPointer = 3, kBiasType = 4, kWeightScale = 5,
                       kYFactor = 8;
  static constexpr int kBatchCount = 0, kBatchStride = 1;
  static constexpr size_t kAlgorithmBytes = 24;  // hipblasLtMatmulAlgo_t: uint8_t[16], size_t
  static constexpr bool kSetsAlignment = false;
  // Split-K GEMMs accumulate in a buffer of the handle, so two streams must not share it.
  static constexpr bool kHandlePerStream = true;
  // If hipBLASLt has fewer proposals than requested, it searches all solutions and loads their files.
  static constexpr int kMaxProposals = 8;
#else
  static constexpr const char* kPrefix = "cublasLt";
  static constexpr auto& kLibraries = platform::kCublasLt;
  static constexpr int kCompute = 68;    // CUBLAS_COMPUTE_32F
  static constexpr int kTransposed = 1;  // CUBLAS_OP_T
  static constexpr int kTransposeWeight = 3, kEpilogue = 7, kBiasPointer = 8, kWeightScale = 17, kYFactor = 20,
                       kFastSums = 25, kBiasType = 26;
  static constexpr int kBatchCount = 5, kBatchStride = 6;
  static constexpr size_t kAlgorithmBytes = 64;
  static constexpr bool kSetsAlignment = true;
  static constexpr bool kHandlePerStream = false;  // a GEMM writes only Y and its workspace
  static constexpr int kMaxProposals = 16;
#endif
  static constexpr int kEpilogueBias = 4, kEpilogueGelu = 32, kMaxWorkspace = 1, kFirstAlignment = 5,
                       kLastAlignment = 8;
  static constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14;  // cudaDataType_t and hipDataType
  static constexpr int kFloat8 = 28, kFloat8Fnuz = 1000;            // e4m3; the latter in hipDataType alone
  static constexpr uint64_t kWorkspaceLimit = 32 << 20;
  static constexpr uint32_t kAlignment = 16;

  // cublasLtMatmulHeuristicResult_t or hipblasLtMatmulHeuristicResult_t; begins with the algorithm for `matmul_`.
  struct Algorithm {
    alignas(8) unsigned char bytes[kAlgorithmBytes];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
  };

  struct Problem {
    void* description = nullptr;
    void* x = nullptr;
    void* weight = nullptr;
    void* skip = nullptr;  // y but for the type
    void* y = nullptr;
    std::vector<Algorithm> algorithms;
  };

  // Loads the library in the folder of the runtime, which may be unknown to the loader, else by name; null without one.
  static void* load_library() {
    const std::string runtime = runtime_path();
    const std::string folder = runtime.substr(0, runtime.find_last_of("/\\") + 1);
    for (const char* name : kLibraries) {
      if (folder.empty()) break;
      if (void* library = platform::load(folder + name)) return library;
    }
    return platform::load_first(kLibraries);
  }

  BlasLt() {
    void* const library = load_library();
    if (library == nullptr) return;
    const bool found = find(library, "Create", create_) && find(library, "MatmulDescCreate", create_gemm_) &&
                       find(library, "MatmulDescSetAttribute", set_attribute_) &&
                       find(library, "MatrixLayoutCreate", create_layout_) &&
                       find(library, "MatrixLayoutSetAttribute", set_layout_) &&
                       find(library, "MatmulPreferenceCreate", create_preference_) &&
                       find(library, "MatmulPreferenceSetAttribute", set_preference_) &&
                       find(library, "MatmulAlgoGetHeuristic", propose_) && find(library, "Matmul", matmul_);
    if (found) handle_ = create_handle();
  }

  // Returns the entry of `key`, created by `create` if missing. Creation allocates device memory in the library, so it
  // runs while no other thread captures; the mutex, which a capture needs, is released until then.
  template <class Key, class Value, class Make>
  static Value* get_or_create(std::mutex& mutex, std::map<Key, Value*>& entries, Key key, const Make& create) {
    Value* entry = nullptr;
    const auto find = [&](const auto& fallback) {
      std::lock_guard<std::mutex> lock(mutex);
      Value*& found = entries[key];
      if (found == nullptr) found = fallback();
      entry = found;
    };
    find([]() -> Value* { return nullptr; });
    if (entry == nullptr) Captures::instance().run_without([&] { find(create); });
    return entry;
  }

  // Returns the handle for a stream, or null. All handles of a device accept the same algorithms.
  void* handle_for(void* stream) {
    if (!kHandlePerStream || handle_ == nullptr) return handle_;
    return get_or_create(mutex_, stream_handles_, stream, [this] { return create_handle(); });
  }

  void* create_handle() const {
    void* handle = nullptr;
    return create_(&handle) == 0 ? handle : nullptr;
  }

  template <class Function>
  static bool find(void* library, const char* name, Function*& function) {
    return platform::find(library, std::string(kPrefix) + name, function);
  }

  static bool aligned(const Gemm& p) {
    for (const void* pointer : {p.x, p.weight, p.bias, p.skip, static_cast<const void*>(p.y)}) {
      if (reinterpret_cast<uintptr_t>(pointer) % kAlignment != 0) return false;
    }
    return true;
  }

  static int64_t stride(int64_t requested, int64_t contiguous) { return requested == 0 ? contiguous : requested; }

  // Returns the cached descriptors and proposals of a shape; no algorithms if the library is missing or has none.
  Problem& problem(const Gemm& p) {
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
                                      p.batch,
                                      p.gelu,
                                      static_cast<int64_t>(p.float8),
                                      p.y_factor != nullptr};
    std::unique_ptr<Problem>& entry = problems_[key];
    if (entry == nullptr) {
      entry = std::make_unique<Problem>();
      if (handle_ != nullptr) request_proposals(p, *entry);
    }
    return *entry;
  }

  void request_proposals(const Gemm& p, Problem& problem) {
    const int type = p.dtype == DType::kFloat32 ? kFloat32 : p.dtype == DType::kFloat16 ? kFloat16 : kBFloat16;
    void* preference = nullptr;
    int status = create_gemm_(&problem.description, kCompute, kFloat32);
    const int epilogue = (p.bias == nullptr ? 0 : kEpilogueBias) | (p.gelu ? kEpilogueGelu : 0);
    if (status == 0 && epilogue != 0) {
      status = set_attribute_(problem.description, kEpilogue, &epilogue, sizeof(epilogue));
    }
    if (status == 0 && p.bias != nullptr) {
      status = set_attribute_(problem.description, kBiasPointer, &p.bias, sizeof(p.bias));
    }
    if (status == 0 && p.transposed) {
      status = set_attribute_(problem.description, kTransposeWeight, &kTransposed, sizeof(kTransposed));
    }
    const bool float8 = p.float8 != Float8::kNone;
    if (status == 0 && float8) {
      status = set_attribute_(problem.description, kWeightScale, &p.weight_scale, sizeof(p.weight_scale));
    }
    const bool float8_y = p.y_factor != nullptr;
    if (status == 0 && float8_y) {
      status = set_attribute_(problem.description, kYFactor, &p.y_factor, sizeof(p.y_factor));
      if (status == 0) status = set_attribute_(problem.description, kBiasType, &type, sizeof(type));
    }
#if !SD_ORT_HIP
    constexpr signed char kFast = 1;  // sums of a few products with fewer bits, as in training's forward pass
    if (status == 0 && float8) status = set_attribute_(problem.description, kFastSums, &kFast, sizeof(kFast));
#endif
    const int operands = !float8 ? type : p.float8 == Float8::kFnuz ? kFloat8Fnuz : kFloat8;
    const int64_t inner = p.transposed ? p.columns : p.inner, columns = p.transposed ? p.inner : p.columns;
    if (status == 0)
      status = create_layout_(&problem.weight, operands, columns, inner, stride(p.weight_stride, columns));
    if (status == 0) status = create_layout_(&problem.x, operands, p.inner, p.rows, stride(p.x_stride, p.inner));
    const int y_type = p.float32_y ? kFloat32 : type;
    const int64_t y_stride = stride(p.y_stride, p.columns);
    if (status == 0) status = create_layout_(&problem.y, float8_y ? kFloat8 : y_type, p.columns, p.rows, y_stride);
    problem.skip = problem.y;
    if (status == 0 && float8_y) status = create_layout_(&problem.skip, y_type, p.columns, p.rows, y_stride);
    if (status == 0 && p.batch > 1) status = set_batch(problem.weight, p.batch, p.inner * p.columns);
    if (status == 0 && p.batch > 1) status = set_batch(problem.x, p.batch, p.rows * p.inner);
    if (status == 0 && p.batch > 1) status = set_batch(problem.y, p.batch, p.rows * p.columns);
    if (status == 0) status = create_preference_(&preference);
    if (status == 0) status = set_preference_(preference, kMaxWorkspace, &kWorkspaceLimit, sizeof(kWorkspaceLimit));
    for (int which = kFirstAlignment; kSetsAlignment && status == 0 && which <= kLastAlignment; ++which) {
      status = set_preference_(preference, which, &kAlignment, sizeof(kAlignment));
    }
    if (status != 0) return;
    std::vector<Algorithm> proposed(kMaxProposals);
    int count = 0;
    status = propose_(handle_, problem.description, problem.weight, problem.x, problem.skip, problem.y, preference,
                      kMaxProposals, proposed.data(), &count);
    for (int i = 0; status == 0 && i < count; ++i) {
      if (proposed[i].status == 0) problem.algorithms.push_back(proposed[i]);
    }
  }

  int set_batch(void* layout, int32_t count, int64_t stride) {
    const int status = set_layout_(layout, kBatchCount, &count, sizeof(count));
    return status == 0 ? set_layout_(layout, kBatchStride, &stride, sizeof(stride)) : status;
  }

  int (*create_)(void** handle) = nullptr;
  int (*create_gemm_)(void** gemm, int compute, int scale) = nullptr;
  int (*set_attribute_)(void* gemm, int attribute, const void* value, size_t bytes) = nullptr;
  int (*create_layout_)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*set_layout_)(void* layout, int attribute, const void* value, size_t bytes) = nullptr;
  int (*create_preference_)(void** preference) = nullptr;
  int (*set_preference_)(void* preference, int attribute, const void* value, size_t bytes) = nullptr;
  int (*propose_)(void* handle, void* gemm, void* a, void* b, void* c, void* d, void* preference, int capacity,
                  Algorithm* proposed, int* count) = nullptr;
  int (*matmul_)(void* handle, void* gemm, const void* alpha, const void* a, void* a_layout, const void* b,
                 void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                 const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) = nullptr;
  void* handle_ = nullptr;  // for proposals, and for GEMMs if streams share it
  std::mutex mutex_;
  std::map<void*, void*> stream_handles_;
  std::map<std::vector<int64_t>, std::unique_ptr<Problem>> problems_;
};

// Candidate "blas_lt_<index>": proposal `index` of the library for the GEMM that `gemm(params)` returns.
template <class Params, class MakeGemm>
Candidate<Params> blas_lt_candidate(int index, MakeGemm gemm) {
  return {"blas_lt_" + std::to_string(index),
          [=](const Params& p) { return BlasLt::instance().supports(gemm(p), index); },
          [=](const Params& p, void* workspace, void* stream) {
            return BlasLt::instance().run(gemm(p), index, workspace, stream);
          },
          [=](const Params& p) { return BlasLt::instance().workspace_bytes(gemm(p), index); }};
}

}  // namespace sd_ort
