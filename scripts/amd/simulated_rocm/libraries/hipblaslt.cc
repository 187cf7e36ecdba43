// Simulated libhipblaslt.so.1: the functions that common/blas_lt.h takes, over host memory. Built from the real header.
//
// Stricter than the real library: an algorithm must be one that was proposed for exactly this problem, its workspace
// must be there, and all matrices must lie in the device's memory, aligned to 16 bytes. Each product fills its
// workspace with garbage.
#include <hipblaslt/hipblaslt.h>

#include <cstddef>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

#include "library.h"

static_assert(sizeof(hipblasLtMatmulAlgo_t) == 24 && sizeof(hipblasLtMatmulHeuristicResult_t) == 56);

namespace {

using simulated::DType;
using simulated::fail;

constexpr size_t kAlignment = 16;
// What the proposals need, the best first, as far as the preference allows it.
constexpr size_t kWorkspaces[] = {size_t{2} << 20, 0, 64 << 10, size_t{32} << 20, 4096};

struct Handle {
  std::set<hipStream_t> streams;  // that it was used with
};

struct Product {
  hipblasOperation_t transpose_a = HIPBLAS_OP_N, transpose_b = HIPBLAS_OP_N;
  uint32_t epilogue = HIPBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;  // as D's
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  bool is_float32 = false;
};

struct Layout {
  hipDataType type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batch = 1;
  int64_t batch_stride = 0;

  // Elements from the first to behind the last.
  size_t extent() const { return (batch - 1) * batch_stride + (columns - 1) * leading + rows; }
};

struct Preference {
  uint64_t workspace_limit = 0;
};

// What is in hipblasLtMatmulAlgo_t::data.
struct Proposal {
  uint64_t problem;  // hash of what it was proposed for
  uint32_t index;    // into kWorkspaces
  uint32_t check;
};
static_assert(sizeof(Proposal) == sizeof(hipblasLtMatmulAlgo_t::data));

// Live objects of this library; anything else is a foreign pointer.
std::mutex mutex;
std::set<const void*>& objects() {
  static auto* const all = new std::set<const void*>;
  return *all;
}

template <class Object, class Handle>
hipblasStatus_t create(Handle* handle, Object object = {}) {
  if (handle == nullptr) return HIPBLAS_STATUS_INVALID_VALUE;
  auto* created = new Object(object);
  *handle = reinterpret_cast<Handle>(created);
  std::lock_guard<std::mutex> lock(mutex);
  objects().insert(created);
  return HIPBLAS_STATUS_SUCCESS;
}

template <class Object, class Handle>
Object& object_of(Handle handle, const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  if (objects().count(handle) == 0) fail("%s: %p is no object of hipBLASLt", function, (const void*)handle);
  return *reinterpret_cast<Object*>(handle);
}

template <class Object, class Handle>
hipblasStatus_t destroy(Handle handle, const char* function) {
  Object* object = &object_of<Object>(handle, function);
  std::lock_guard<std::mutex> lock(mutex);
  objects().erase(object);
  delete object;
  return HIPBLAS_STATUS_SUCCESS;
}

// Copies an attribute's value if it has the type's size.
template <class T>
hipblasStatus_t take(T& to, const void* value, size_t bytes) {
  if (value == nullptr || bytes < sizeof(T)) return HIPBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, value, sizeof(T));
  return HIPBLAS_STATUS_SUCCESS;
}

bool is_float8(int type) { return type == HIP_R_8F_E4M3 || type == HIP_R_8F_E4M3_FNUZ; }

// The kind of float8 that the device has instructions for, 0 if it has none.
int device_float8() {
  const std::string target = simulated_hip_target();
  if (target == "gfx942") return HIP_R_8F_E4M3_FNUZ;
  return target == "gfx950" || target.rfind("gfx12", 0) == 0 ? HIP_R_8F_E4M3 : 0;
}

bool dtype_of(int type, DType& dtype) {
  if (is_float8(type)) {
    dtype = type == HIP_R_8F_E4M3 ? DType::kFloat8 : DType::kFloat8Fnuz;
    return true;
  }
  if (type != HIP_R_32F && type != HIP_R_16F && type != HIP_R_16BF) return false;
  dtype = type == HIP_R_32F ? DType::kFloat32 : type == HIP_R_16F ? DType::kFloat16 : DType::kBFloat16;
  return true;
}

bool is_same(const Layout& a, const Layout& b) {
  return a.type == b.type && a.rows == b.rows && a.columns == b.columns && a.leading == b.leading &&
         a.batch == b.batch && a.batch_stride == b.batch_stride;
}

// Whether the layouts are those of one product, of types that the library has kernels for.
hipblasStatus_t check(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const bool ta = product.transpose_a != HIPBLAS_OP_N, tb = product.transpose_b != HIPBLAS_OP_N;
  const uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns;
  const uint64_t inner = tb ? b.columns : b.rows, n = tb ? b.rows : b.columns;
  if (inner != k || d.rows != m || d.columns != n || c.rows != m || c.columns != n) return HIPBLAS_STATUS_INVALID_VALUE;
  if (a.batch != d.batch || b.batch != d.batch || c.batch != d.batch) return HIPBLAS_STATUS_INVALID_VALUE;
  const bool is_known =
      (product.epilogue & ~HIPBLASLT_EPILOGUE_GELU_BIAS) == 0 || product.epilogue == HIPBLASLT_EPILOGUE_DEFAULT;
  if (!product.is_float32 || !is_known || a.type != b.type || c.type != d.type) return HIPBLAS_STATUS_NOT_SUPPORTED;
  if (is_float8(a.type)) {
    return a.type == device_float8() && !is_float8(d.type) ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_NOT_SUPPORTED;
  }
  if (product.a_scale != nullptr || product.b_scale != nullptr) return HIPBLAS_STATUS_NOT_SUPPORTED;
  if (d.type != a.type && d.type != HIP_R_32F) return HIPBLAS_STATUS_NOT_SUPPORTED;
  return HIPBLAS_STATUS_SUCCESS;
}

uint64_t hash(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  uint64_t sum = 1469598103934665603u;
  const auto add = [&](uint64_t value) { sum = (sum ^ value) * 1099511628211u + (value >> 29); };
  for (uint64_t value : {uint64_t(product.transpose_a), uint64_t(product.transpose_b), uint64_t(product.epilogue)}) {
    add(value);
  }
  for (const Layout* layout : {&a, &b, &c, &d}) {
    for (uint64_t value : {uint64_t(layout->type), layout->rows, layout->columns, uint64_t(layout->leading),
                           uint64_t(layout->batch), uint64_t(layout->batch_stride)}) {
      add(value);
    }
  }
  return sum;
}

Proposal proposal(uint64_t problem, uint32_t index) {
  return {problem, index, static_cast<uint32_t>(problem >> 32) ^ (index * 2654435761u) ^ 0x5d04f7u};
}

}  // namespace

SIMULATED_EXPORT hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle) { return create<Handle>(handle); }
SIMULATED_EXPORT hipblasStatus_t hipblasLtDestroy(const hipblasLtHandle_t handle) {
  return destroy<Handle>(handle, "hipblasLtDestroy");
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t, int* version) {
  *version = HIPBLASLT_VERSION_MAJOR * 100000 + HIPBLASLT_VERSION_MINOR * 100;
  return HIPBLAS_STATUS_SUCCESS;
}

SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* product, hipblasComputeType_t compute,
                                                           hipDataType scale) {
  Product created;
  created.is_float32 = compute == HIPBLAS_COMPUTE_32F && scale == HIP_R_32F;
  return create<Product>(product, created);
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulDescDestroy(const hipblasLtMatmulDesc_t product) {
  return destroy<Product>(product, "hipblasLtMatmulDescDestroy");
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t desc,
                                                                 hipblasLtMatmulDescAttributes_t attribute,
                                                                 const void* value, size_t bytes) {
  Product& product = object_of<Product>(desc, "hipblasLtMatmulDescSetAttribute");
  switch (attribute) {
    case HIPBLASLT_MATMUL_DESC_TRANSA:
      return take(product.transpose_a, value, bytes);
    case HIPBLASLT_MATMUL_DESC_TRANSB:
      return take(product.transpose_b, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE:
      return take(product.epilogue, value, bytes);
    case HIPBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(product.bias, value, bytes);
    case HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return take(product.bias_type, value, bytes);
    case HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(product.a_scale, value, bytes);
    case HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(product.b_scale, value, bytes);
    default:
      fail("hipblasLtMatmulDescSetAttribute: attribute %d is not simulated", attribute);
  }
}

SIMULATED_EXPORT hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* layout, hipDataType type,
                                                             uint64_t rows, uint64_t columns, int64_t leading) {
  if (rows == 0 || columns == 0 || leading < static_cast<int64_t>(rows)) return HIPBLAS_STATUS_INVALID_VALUE;
  return create<Layout>(layout, {type, rows, columns, leading});
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatrixLayoutDestroy(const hipblasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout, "hipblasLtMatrixLayoutDestroy");
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatrixLayoutSetAttribute(hipblasLtMatrixLayout_t handle,
                                                                   hipblasLtMatrixLayoutAttribute_t attribute,
                                                                   const void* value, size_t bytes) {
  Layout& layout = object_of<Layout>(handle, "hipblasLtMatrixLayoutSetAttribute");
  switch (attribute) {
    case HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return take(layout.batch, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return take(layout.batch_stride, value, bytes);
    default:
      fail("hipblasLtMatrixLayoutSetAttribute: attribute %d is not simulated", attribute);
  }
}

SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* preference) {
  return create<Preference>(preference);
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceDestroy(const hipblasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference, "hipblasLtMatmulPreferenceDestroy");
}
SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t preference,
                                                                       hipblasLtMatmulPreferenceAttributes_t attribute,
                                                                       const void* value, size_t bytes) {
  if (attribute != HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    fail("hipblasLtMatmulPreferenceSetAttribute: attribute %d is not simulated", attribute);
  }
  return take(object_of<Preference>(preference, "hipblasLtMatmulPreferenceSetAttribute").workspace_limit, value, bytes);
}

SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(
    hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc, hipblasLtMatrixLayout_t a_layout,
    hipblasLtMatrixLayout_t b_layout, hipblasLtMatrixLayout_t c_layout, hipblasLtMatrixLayout_t d_layout,
    hipblasLtMatmulPreference_t preference, int requested, hipblasLtMatmulHeuristicResult_t results[], int* count) {
  constexpr const char* kName = "hipblasLtMatmulAlgoGetHeuristic";
  simulated_hip_count(kName);
  (void)object_of<Handle>(handle, kName);
  const Product& product = object_of<Product>(desc, kName);
  const Layout &a = object_of<Layout>(a_layout, kName), &b = object_of<Layout>(b_layout, kName);
  const Layout &c = object_of<Layout>(c_layout, kName), &d = object_of<Layout>(d_layout, kName);
  const uint64_t limit = object_of<Preference>(preference, kName).workspace_limit;
  *count = 0;
  if (requested < 1 || results == nullptr) return HIPBLAS_STATUS_INVALID_VALUE;
  if (const hipblasStatus_t status = check(product, a, b, c, d); status != HIPBLAS_STATUS_SUCCESS) return status;
  const uint64_t problem = hash(product, a, b, c, d);
  for (uint32_t index = 0; index < std::size(kWorkspaces) && *count < requested; ++index) {
    if (kWorkspaces[index] > limit) continue;
    hipblasLtMatmulHeuristicResult_t& result = results[(*count)++];
    const Proposal proposed = proposal(problem, index);
    std::memcpy(result.algo.data, &proposed, sizeof(proposed));
    result.algo.max_workspace_bytes = limit;
    result.workspaceSize = kWorkspaces[index];
    result.state = HIPBLAS_STATUS_SUCCESS;
    result.wavesCount = 0.75f;
    std::fill(std::begin(result.reserved), std::end(result.reserved), -1);
  }
  return *count > 0 ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_NOT_SUPPORTED;
}

SIMULATED_EXPORT hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc,
                                                 const void* alpha, const void* a, hipblasLtMatrixLayout_t a_layout,
                                                 const void* b, hipblasLtMatrixLayout_t b_layout, const void* beta,
                                                 const void* c, hipblasLtMatrixLayout_t c_layout, void* d,
                                                 hipblasLtMatrixLayout_t d_layout,
                                                 const hipblasLtMatmulAlgo_t* algorithm, void* workspace,
                                                 size_t workspace_bytes, hipStream_t stream) {
  constexpr const char* kName = "hipblasLtMatmul";
  Handle& owner = object_of<Handle>(handle, kName);
  const Product product = object_of<Product>(desc, kName);
  const Layout la = object_of<Layout>(a_layout, kName), lb = object_of<Layout>(b_layout, kName);
  const Layout lc = object_of<Layout>(c_layout, kName), ld = object_of<Layout>(d_layout, kName);
  if (!alpha || !beta || !a || !b || !c || !d) return HIPBLAS_STATUS_INVALID_VALUE;
  if (const hipblasStatus_t status = check(product, la, lb, lc, ld); status != HIPBLAS_STATUS_SUCCESS) return status;

  simulated_hip_count(kName);
  if (algorithm == nullptr) fail("%s: the choice without an algorithm is not simulated", kName);
  Proposal given;
  std::memcpy(&given, algorithm->data, sizeof(given));
  const uint64_t problem = hash(product, la, lb, lc, ld);
  const Proposal expected = proposal(problem, given.index);
  if (given.index >= std::size(kWorkspaces) || std::memcmp(&given, &expected, sizeof(given)) != 0) {
    fail("%s: the algorithm is not one that was proposed for this problem", kName);
  }
  const size_t needed = kWorkspaces[given.index];
  if (workspace_bytes < needed || (needed > 0 && workspace == nullptr)) {
    fail("%s: the algorithm needs a workspace of %zu bytes, got %zu at %p", kName, needed, workspace_bytes, workspace);
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    owner.streams.insert(stream);
    // Algorithms with a workspace synchronize their blocks through a buffer of the handle.
    if (needed > 0 && owner.streams.size() == 2) simulated_hip_count("hipblasLtMatmul, second stream of a handle");
  }

  simulated::Gemm gemm{};
  gemm.transpose_a = product.transpose_a != HIPBLAS_OP_N;
  gemm.transpose_b = product.transpose_b != HIPBLAS_OP_N;
  gemm.m = ld.rows, gemm.n = ld.columns, gemm.k = gemm.transpose_a ? la.rows : la.columns;
  gemm.alpha = *static_cast<const float*>(alpha), gemm.beta = *static_cast<const float*>(beta);
  gemm.a = a, gemm.lda = la.leading, gemm.a_stride = la.batch_stride;
  gemm.b = b, gemm.ldb = lb.leading, gemm.b_stride = lb.batch_stride;
  gemm.c = c, gemm.ldc = lc.leading, gemm.c_stride = lc.batch_stride;
  gemm.d = d, gemm.ldd = ld.leading, gemm.d_stride = ld.batch_stride;
  gemm.batch = ld.batch;
  if (!dtype_of(la.type, gemm.a_dtype) || !dtype_of(lb.type, gemm.b_dtype) || !dtype_of(ld.type, gemm.d_dtype)) {
    return HIPBLAS_STATUS_NOT_SUPPORTED;
  }
  gemm.gelu = (product.epilogue & HIPBLASLT_EPILOGUE_GELU) != 0;
  gemm.a_scale = product.a_scale, gemm.b_scale = product.b_scale;
  for (const float* scale : {gemm.a_scale, gemm.b_scale}) {
    if (scale != nullptr) simulated::check_memory(kName, "a scale", scale, sizeof(float), alignof(float));
  }
  if (product.epilogue == HIPBLASLT_EPILOGUE_BIAS || product.epilogue == HIPBLASLT_EPILOGUE_GELU_BIAS) {
    gemm.bias = product.bias;
    if (!dtype_of(product.bias_type == -1 ? ld.type : product.bias_type, gemm.bias_dtype)) {
      return HIPBLAS_STATUS_NOT_SUPPORTED;
    }
    if (gemm.bias == nullptr) fail("%s: the epilogue adds a bias, and its pointer is null", kName);
    simulated::check_memory(kName, "bias", gemm.bias, gemm.m * simulated::bytes_of(gemm.bias_dtype), kAlignment);
  }
  simulated::check_memory(kName, "A", a, la.extent() * simulated::bytes_of(gemm.a_dtype), kAlignment);
  simulated::check_memory(kName, "B", b, lb.extent() * simulated::bytes_of(gemm.b_dtype), kAlignment);
  if (gemm.beta != 0) {
    simulated::check_memory(kName, "C", c, lc.extent() * simulated::bytes_of(gemm.d_dtype), kAlignment);
  }
  simulated::check_memory(kName, "D", d, ld.extent() * simulated::bytes_of(gemm.d_dtype), kAlignment);
  simulated::check_memory(kName, "the workspace", workspace, needed, kAlignment);
  const hipError_t error = simulated::submit(stream, [gemm, workspace, needed] {
    if (needed > 0) std::memset(workspace, 0xA5, needed);
    gemm.run();
  });
  return error == hipSuccess ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_EXECUTION_FAILED;
}
