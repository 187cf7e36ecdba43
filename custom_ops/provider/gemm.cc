// The ways to run a product: the algorithms that cuBLASLt or hipBLASLt proposes, and a thread an element.
#include "provider/gemm.h"

#if !defined(SD_ORT_SIMULATED_DEVICE)
#include "common/blas_lt.h"
#endif
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

#if !defined(SD_ORT_SIMULATED_DEVICE)
constexpr int kAlgorithms = 8;

// Product `index` of the batch.
BlasLt::Product one(const ProductParams& p, int64_t index) {
  const int64_t bytes = static_cast<int64_t>(size_of(p.dtype));
  const auto moved = [&](const void* from, int64_t elements) {
    return static_cast<const char*>(from) + elements * bytes;
  };
  BlasLt::Product product{};
  product.dtype = p.dtype;
  product.x = moved(p.x, index * p.x_batch_stride);
  product.weight = moved(p.weight, index * p.weight_batch_stride);
  product.bias = p.bias;
  product.y = const_cast<char*>(moved(p.y, index * p.rows * p.columns));
  product.rows = p.rows;
  product.inner = p.inner;
  product.columns = p.columns;
  product.transposed = p.transposed != 0;
  product.scale = p.scale;
  return product;
}

Candidate<ProductParams> library_candidate(int number) {
  return {"blas_lt_" + std::to_string(number),
          [=](const ProductParams& p) {
            for (int64_t index = 0; index < p.batch; ++index) {  // alignment may differ
              if (!BlasLt::instance().supports(one(p, index), number)) return false;
            }
            return p.batch > 0;
          },
          [=](const ProductParams& p, void* workspace, void* stream) -> const char* {
            for (int64_t index = 0; index < p.batch; ++index) {
              const char* error = BlasLt::instance().run(one(p, index), number, workspace, stream);
              if (error != nullptr) return error;
            }
            return nullptr;
          },
          [=](const ProductParams& p) { return BlasLt::instance().workspace_bytes(one(p, 0), number); }};
}
#endif

std::vector<Candidate<ProductParams>> candidates() {
  std::vector<Candidate<ProductParams>> all;
  all.push_back({"plain", [](const ProductParams&) { return true; },
                 [](const ProductParams& p, void*, void* stream) { return product_launch(p, stream); }});
#if !defined(SD_ORT_SIMULATED_DEVICE)
  for (int number = 0; number < kAlgorithms; ++number) all.push_back(library_candidate(number));
#endif
  return all;
}

// The library's favorite, where it takes the product.
std::string default_name([[maybe_unused]] const ProductParams& p) {
#if !defined(SD_ORT_SIMULATED_DEVICE)
  const Candidate<ProductParams> favorite = library_candidate(0);
  if (favorite.is_supported(p)) return favorite.name;
#endif
  return "plain";
}

}  // namespace

const GpuOp& product_op() {
  static const TunableOp<ProductParams> op("Product", candidates(), default_name);
  return op;
}

const char* missing_library() {
#if defined(SD_ORT_SIMULATED_DEVICE)
  return nullptr;
#else
  return BlasLt::missing();
#endif
}

}  // namespace sd_ort
