// The ways to run LinearSplitGelu: the product into memory and the gate behind it, the product by our plain kernel or
// by the algorithms that cuBLASLt or hipBLASLt proposes, its favorite first; and both in one kernel, on Hopper.
#include "common/blas_lt.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/bias_split_gelu/op.h"
#include "operators/linear_add/op.h"
#include "operators/linear_split_gelu/op.h"

namespace sd_ort {
namespace {

using Params = LinearSplitGeluParams;

constexpr int kAlgorithms = 8;
constexpr size_t kAlignment = 256;   // of the library's workspace behind the product
constexpr int64_t kManyRows = 1024;  // from there on ours is faster: results/ops_products_attention_sm_90.md

size_t product_bytes(const Params& p) { return 2 * p.rows * p.half * size_of(p.dtype); }

const char* gate(const Params& p, const void* product, void* stream) {
  const BiasSplitGeluParams gate{p.dtype, product, p.bias, p.y, p.rows, p.half};
  return bias_split_gelu_launch(gate, bias_split_gelu_default(gate), stream);
}

Candidate<Params> plain() {
  const auto supports = [](const Params&) { return true; };
  const auto run = [](const Params& p, void* product, void* stream) {
    const LinearAddParams linear{p.dtype, p.x, p.weight, nullptr, nullptr, product, p.rows, p.inner, 2 * p.half};
    const char* error = linear_add_launch(linear, stream);
    return error == nullptr ? gate(p, product, stream) : error;
  };
  return {"plain", supports, run, product_bytes};
}

// `y`: where the product goes; for questions about a shape, anything aligned.
BlasLt::Product product(const Params& p, void* y) {
  return {p.dtype, p.x, p.weight, nullptr, nullptr, y, p.rows, p.inner, 2 * p.half};
}

Candidate<Params> library_candidate(int number) {
  const auto supports = [=](const Params& p) { return BlasLt::instance().supports(product(p, nullptr), number); };
  const auto begin = [](const Params& p) { return ceil_div(product_bytes(p), kAlignment) * kAlignment; };
  const auto run = [=](const Params& p, void* workspace, void* stream) {
    char* const rest = static_cast<char*>(workspace) + begin(p);
    const char* error = BlasLt::instance().run(product(p, workspace), number, rest, stream);
    return error == nullptr ? gate(p, workspace, stream) : error;
  };
  const auto bytes = [=](const Params& p) {
    return begin(p) + BlasLt::instance().workspace_bytes(product(p, nullptr), number);
  };
  return {"blas_lt_" + std::to_string(number), supports, run, bytes};
}

#if !SD_ORT_HIP
Candidate<Params> warpgroups() {
  const auto run = [](const Params& p, void*, void* stream) { return linear_split_gelu_warpgroups(p, stream); };
  return {"warpgroups", linear_split_gelu_takes_warpgroups, run};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {plain()};
  for (int number = 0; number < kAlgorithms; ++number) all.push_back(library_candidate(number));
#if !SD_ORT_HIP
  all.push_back(warpgroups());
#endif
  return all;
}

// The library's favorite, where it takes the call; ours where rows are many.
std::string default_name(const Params& p) {
#if !SD_ORT_HIP
  if (p.rows >= kManyRows && warpgroups().is_supported(p)) return "warpgroups";
#endif
  const Candidate<Params> favorite = library_candidate(0);
  return favorite.is_supported(p) ? favorite.name : "plain";
}

}  // namespace

const GpuOp& linear_split_gelu_gpu() {
  static const TunableOp<Params> op("LinearSplitGelu", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
