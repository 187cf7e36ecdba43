// GEMM candidates: a generic kernel with one thread per element, the tile kernel of NhwcConv for fp16 and bf16, and the
// algorithms that cuBLASLt or hipBLASLt proposes.
#include "provider/gemm.h"

#include "common/vendors/which.h"
#if !SD_ORT_SIMULATED
#include "common/blas_lt.h"
#include "operators/nhwc_conv/op.h"
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

// Problem `index` of the batch as a 1 x 1 convolution.
NhwcConvParams conv_entry(const GemmParams& p, int64_t index) {
  const BlasLt::Gemm gemm = batch_entry(p, index);
  NhwcConvParams conv = nhwc_conv_product(p.dtype, gemm.x, gemm.weight, gemm.y, p.rows, p.inner, p.columns);
  conv.bias = p.bias;
  return conv;
}

Candidate<GemmParams> tiles_candidate() {
  return {
      "tiles",
      [](const GemmParams& p) { return p.batch > 0 && p.scale == 1.f && nhwc_conv_tiles_supports(conv_entry(p, 0)); },
      [](const GemmParams& p, void* workspace, void* stream) {
        const int64_t splits = nhwc_conv_splits(conv_entry(p, 0));
        const char* error = nullptr;
        for (int64_t index = 0; index < p.batch && error == nullptr; ++index) {
          const NhwcConvParams conv = conv_entry(p, index);
          error = p.transposed ? nhwc_conv_tiles_launch(conv, splits, workspace, stream)
                               : nhwc_conv_product_launch(conv, false, splits, workspace, stream);
        }
        return error;
      },
      [](const GemmParams& p) {
        const NhwcConvParams conv = conv_entry(p, 0);
        return nhwc_conv_tiles_workspace(conv, nhwc_conv_splits(conv));
      }};
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
  all.push_back(tiles_candidate());
  for (int algorithm = 0; algorithm < kAlgorithms; ++algorithm) all.push_back(library_candidate(algorithm));
#endif
  return all;
}

// The first proposal of the library if it supports the call, else tiles if they do, else the generic kernel.
std::string default_name([[maybe_unused]] const GemmParams& p) {
#if !SD_ORT_SIMULATED
  for (const Candidate<GemmParams>& candidate : {library_candidate(0), tiles_candidate()}) {
    if (candidate.is_supported(p)) return candidate.name;
  }
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
