// GEMM candidates: the algorithms that cuBLASLt or hipBLASLt proposes, and a generic kernel with one thread per
// element.
#include "provider/gemm.h"

#include "common/vendors/which.h"
#if !SD_ORT_SIMULATED
#include "common/blas_lt.h"
#endif
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

#if !SD_ORT_SIMULATED
constexpr int kAlgorithms = 8;

// Problem `index` of the batch.
BlasLt::Gemm batch_entry(const GemmParams& p, int64_t index) {
  const int64_t bytes = static_cast<int64_t>(size_of(p.dtype));
  const auto offset = [&](const void* from, int64_t elements) {
    return static_cast<const char*>(from) + elements * bytes;
  };
  BlasLt::Gemm gemm{};
  gemm.dtype = p.dtype;
  gemm.x = offset(p.x, index * p.x_batch_stride);
  gemm.weight = offset(p.weight, index * p.weight_batch_stride);
  gemm.bias = p.bias;
  gemm.y = const_cast<char*>(offset(p.y, index * p.rows * p.columns));
  gemm.rows = p.rows;
  gemm.inner = p.inner;
  gemm.columns = p.columns;
  gemm.transposed = p.transposed != 0;
  gemm.scale = p.scale;
  return gemm;
}

Candidate<GemmParams> library_candidate(int algorithm) {
  return {"blas_lt_" + std::to_string(algorithm),
          [=](const GemmParams& p) {
            for (int64_t index = 0; index < p.batch; ++index) {  // the alignment may differ
              if (!BlasLt::instance().supports(batch_entry(p, index), algorithm)) return false;
            }
            return p.batch > 0;
          },
          [=](const GemmParams& p, void* workspace, void* stream) -> const char* {
            for (int64_t index = 0; index < p.batch; ++index) {
              const char* error = BlasLt::instance().run(batch_entry(p, index), algorithm, workspace, stream);
              if (error != nullptr) return error;
            }
            return nullptr;
          },
          [=](const GemmParams& p) { return BlasLt::instance().workspace_bytes(batch_entry(p, 0), algorithm); }};
}
#endif

std::vector<Candidate<GemmParams>> candidates() {
  std::vector<Candidate<GemmParams>> all;
  all.push_back({"generic", [](const GemmParams&) { return true; },
                 [](const GemmParams& p, void*, void* stream) { return gemm_launch(p, stream); }});
#if !SD_ORT_SIMULATED
  for (int algorithm = 0; algorithm < kAlgorithms; ++algorithm) all.push_back(library_candidate(algorithm));
#endif
  return all;
}

// The first proposal of the library if it supports the call, else the generic kernel.
std::string default_name([[maybe_unused]] const GemmParams& p) {
#if !SD_ORT_SIMULATED
  const Candidate<GemmParams> first = library_candidate(0);
  if (first.is_supported(p)) return first.name;
#endif
  return "generic";
}

}  // namespace

const GpuOp& gemm_op() {
  static const TunableOp<GemmParams> op("Gemm", candidates(), default_name);
  return op;
}

const char* missing_library() {
#if SD_ORT_SIMULATED
  return nullptr;
#else
  return BlasLt::missing();
#endif
}

}  // namespace sd_ort
