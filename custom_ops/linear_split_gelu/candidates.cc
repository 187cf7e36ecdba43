// The ways to run LinearSplitGelu on a GPU; no kernel is its own. The product of all columns, then BiasSplitGelu's kernel
// over it: whole ("blas_lt_N", by the algorithms that cuBLASLt or hipBLASLt proposes), or of so many rows at a time that
// the second kernel finds the product in the cache ("in_cache_N"). Or the product of the left columns, and that of the
// right ones by cuDNN, which multiplies the gate in where it writes ("cudnn_N"; not on AMD).
#include <algorithm>

#include "bias_split_gelu/op.h"
#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "linear_add/op.h"
#include "linear_split_gelu/op.h"
#if !SD_ORT_HIP
#include "linear_split_gelu/cudnn.h"
#endif

namespace sd_ort {
namespace {

using Params = LinearSplitGeluParams;

constexpr int kAlgorithms = 8, kCachedAlgorithms = 4, kPlans = 4;
constexpr int64_t kCachedBytes = 24 << 20;  // half of an H200's cache, so that X and W stay there too
constexpr int64_t kRowStep = 256;           // whole tiles of every algorithm

const void* moved(const void* from, int64_t elements, DType dtype) {
  return static_cast<const char*>(from) + elements * static_cast<int64_t>(size_of(dtype));
}

size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

const char* gate(const Params& p, const void* product, void* y, int64_t rows, bool vectors, void* stream) {
  return bias_split_gelu_launch({p.dtype, product, p.bias, y, rows, p.half}, {vectors, vectors ? 128 : 256}, stream);
}

// The product of some rows, and the gate over it.
class Rows {
 public:
  Rows(const Params& p, int algorithm, int64_t rows) : p_(p), algorithm_(algorithm), rows_(std::min(rows, p.rows)) {}

  bool supported() const {
    if (rows_ == 0 || p_.half * size_of(p_.dtype) % 16 != 0 || !are_aligned<16>(p_.bias, p_.y)) return false;
    for (const int64_t rows : {rows_, p_.rows % rows_}) {
      if (rows > 0 && !BlasLt::instance().supports(product(0, rows, nullptr), algorithm_)) return false;
    }
    return true;
  }
  size_t library_bytes() const {
    size_t most = 0;
    for (const int64_t rows : {rows_, p_.rows % rows_}) {
      if (rows > 0) most = std::max(most, BlasLt::instance().workspace_bytes(product(0, rows, nullptr), algorithm_));
    }
    return rounded(most);
  }
  size_t workspace_bytes() const {
    return library_bytes() + static_cast<size_t>(rows_ * 2 * p_.half) * size_of(p_.dtype);
  }
  const char* run(void* workspace, void* stream) const {
    void* const made = static_cast<char*>(workspace) + library_bytes();
    for (int64_t row = 0; row < p_.rows; row += rows_) {
      const int64_t rows = std::min(rows_, p_.rows - row);
      SD_ORT_RETURN_ERROR(BlasLt::instance().run(product(row, rows, made), algorithm_, workspace, stream));
      void* const y = const_cast<void*>(moved(p_.y, row * p_.half, p_.dtype));
      SD_ORT_RETURN_ERROR(gate(p_, made, y, rows, true, stream));
    }
    return nullptr;
  }

 private:
  BlasLt::Product product(int64_t row, int64_t rows, void* to) const {
    return {p_.dtype, moved(p_.x, row * p_.inner, p_.dtype), p_.weight, nullptr, nullptr, to, rows, p_.inner, 2 * p_.half};
  }

  const Params& p_;
  int algorithm_;
  int64_t rows_;
};

Candidate<Params> rows_candidate(const std::string& name, int algorithm, int64_t (*rows)(const Params&)) {
  return {name,
          [=](const Params& p) {
            const int64_t some = rows(p);
            return some > 0 && Rows(p, algorithm, some).supported();
          },
          [=](const Params& p, void* workspace, void* stream) {
            return Rows(p, algorithm, rows(p)).run(workspace, stream);
          },
          [=](const Params& p) { return Rows(p, algorithm, rows(p)).workspace_bytes(); }};
}

int64_t all_rows(const Params& p) { return p.rows; }

// Rows of two or more parts whose products are kCachedBytes at most; 0 where one part has them all.
int64_t cached_rows(const Params& p) {
  const int64_t bytes = p.rows * 2 * p.half * static_cast<int64_t>(size_of(p.dtype));
  const int64_t parts = std::max<int64_t>(2, ceil_div(bytes, kCachedBytes));
  const int64_t rows = ceil_div(ceil_div(p.rows, parts), kRowStep) * kRowStep;
  return rows < p.rows ? rows : 0;
}

// By one thread an element, twice.
Candidate<Params> plain_candidate() {
  return {"plain", [](const Params&) { return true; },
          [](const Params& p, void* workspace, void* stream) -> const char* {
            const LinearAddParams product = {p.dtype, p.x,    p.weight, nullptr,   nullptr,
                                             workspace, p.rows, p.inner,  2 * p.half};
            SD_ORT_RETURN_ERROR(linear_add_launch(product, stream));
            return gate(p, workspace, p.y, p.rows, false, stream);
          },
          [](const Params& p) { return static_cast<size_t>(p.rows * 2 * p.half) * size_of(p.dtype); }};
}

#if !SD_ORT_HIP
// The left columns by the library's favorite algorithm.
BlasLt::Product left_product(const Params& p, void* left) {
  BlasLt::Product product{p.dtype, p.x, p.weight, p.bias, nullptr, left, p.rows, p.inner, p.half};
  product.weight_stride = 2 * p.half;
  return product;
}
size_t left_bytes(const Params& p) {
  return rounded(static_cast<size_t>(p.rows * p.half) * size_of(p.dtype));
}

Candidate<Params> cudnn_candidate(int number) {
  return {"cudnn_" + std::to_string(number),
          [=](const Params& p) {
            return p.rows > 0 && are_aligned<16>(p.x, p.weight, p.bias, p.y) && CudnnGate(p).supports(number) &&
                   BlasLt::instance().supports(left_product(p, nullptr), 0);
          },
          [=](const Params& p, void* workspace, void* stream) -> const char* {
            void* const rest = static_cast<char*>(workspace) + left_bytes(p);
            SD_ORT_RETURN_ERROR(BlasLt::instance().run(left_product(p, workspace), 0, rest, stream));
            return CudnnGate(p).run(number, workspace, rest, stream);
          },
          [=](const Params& p) {
            const size_t product = BlasLt::instance().workspace_bytes(left_product(p, nullptr), 0);
            return left_bytes(p) + std::max(product, CudnnGate(p).workspace_bytes(number));
          }};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {plain_candidate()};
  for (int number = 0; number < kAlgorithms; ++number) {
    all.push_back(rows_candidate("blas_lt_" + std::to_string(number), number, all_rows));
  }
  for (int number = 0; number < kCachedAlgorithms; ++number) {
    all.push_back(rows_candidate("in_cache_" + std::to_string(number), number, cached_rows));
  }
#if !SD_ORT_HIP
  for (int number = 0; number < kPlans; ++number) all.push_back(cudnn_candidate(number));
#endif
  return all;
}

// The library's favorite over all rows, where it takes the call.
std::string default_name(const Params& p) { return Rows(p, 0, p.rows).supported() ? "blas_lt_0" : "plain"; }

}  // namespace

const GpuOp& linear_split_gelu_gpu() {
  static const TunableOp<Params> op("LinearSplitGelu", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
