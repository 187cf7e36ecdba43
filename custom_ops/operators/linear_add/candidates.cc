// The ways to run LinearAdd: our plain kernel, and the algorithms that cuBLASLt or hipBLASLt proposes, its favorite
// first.
#include "common/blas_lt.h"
#include "common/tunable.h"
#include "operators/linear_add/op.h"

namespace sd_ort {
namespace {

constexpr int kAlgorithms = 12;

Candidate<LinearAddParams> library_candidate(int number) {
  const auto product = [](const LinearAddParams& p) {
    return BlasLt::Product{p.dtype, p.x, p.weight, p.bias, p.skip, p.y, p.rows, p.inner, p.columns};
  };
  return {"blas_lt_" + std::to_string(number),
          [=](const LinearAddParams& p) { return BlasLt::instance().supports(product(p), number); },
          [=](const LinearAddParams& p, void* workspace, void* stream) {
            return BlasLt::instance().run(product(p), number, workspace, stream);
          },
          [=](const LinearAddParams& p) { return BlasLt::instance().workspace_bytes(product(p), number); }};
}

std::vector<Candidate<LinearAddParams>> candidates() {
  std::vector<Candidate<LinearAddParams>> all;
  all.push_back({"plain", [](const LinearAddParams&) { return true; },
                 [](const LinearAddParams& p, void*, void* stream) { return linear_add_launch(p, stream); }});
  for (int number = 0; number < kAlgorithms; ++number) all.push_back(library_candidate(number));
  return all;
}

// The library's favorite, where it takes the call.
std::string default_name(const LinearAddParams& p) {
  const Candidate<LinearAddParams> favorite = library_candidate(0);
  return favorite.is_supported(p) ? favorite.name : "plain";
}

}  // namespace

const GpuOp& linear_add_gpu() {
  static const TunableOp<LinearAddParams> op("LinearAdd", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
