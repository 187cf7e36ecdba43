// The ways to run NhwcConv: our plain kernel, and what cuDNN proposes, its favorite first (not on AMD), for the
// convolution with what is added or alone, the sum a kernel of its own behind it; and where its filters were
// transformed, those of NhwcWinograd.
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/bias_add/op.h"
#include "operators/nhwc_conv/op.h"
#include "operators/nhwc_winograd/op.h"
#if !SD_ORT_HIP
#include "operators/nhwc_conv/cudnn.h"
#endif

namespace sd_ort {

const GpuOp& nhwc_winograd_gpu();

namespace {

#if !SD_ORT_HIP
constexpr int kPlans = 16, kPlansAlone = 6;

Candidate<NhwcConvParams> library_candidate(int number) {
  return {"cudnn_" + std::to_string(number),
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).supports(number); },
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return CudnnConvolution(p).run(number, workspace, stream);
          },
          [=](const NhwcConvParams& p) { return CudnnConvolution(p).workspace_bytes(number); }};
}

// At some sizes cuDNN's convolutions that add are slower than others and a sum behind them (results/gpu_tried.md).
Candidate<NhwcConvParams> apart_candidate(int number) {
  const auto alone = [](NhwcConvParams p) {
    p.bias = p.skip = nullptr;
    return p;
  };
  const auto supports = [=](const NhwcConvParams& p) {
    return p.bias != nullptr && CudnnConvolution(alone(p)).supports(number);
  };
  const auto run = [=](const NhwcConvParams& p, void* workspace, void* stream) {
    const char* error = CudnnConvolution(alone(p)).run(number, workspace, stream);
    if (error != nullptr) return error;
    const int64_t pixels = p.batch * p.out_height * p.out_width;
    const BiasAddParams sum{p.dtype, p.y, p.bias, p.skip, p.y, pixels, p.filter_count};
    return bias_add_launch(sum, bias_add_default(sum), stream);
  };
  const auto bytes = [=](const NhwcConvParams& p) { return CudnnConvolution(alone(p)).workspace_bytes(number); };
  return {"cudnn_apart_" + std::to_string(number), supports, run, bytes};
}
#endif

Candidate<NhwcConvParams> tiles_candidate(const char* name, int64_t (*splits)(const NhwcConvParams&)) {
  return {name, nhwc_conv_tiles_supports,
          [=](const NhwcConvParams& p, void* workspace, void* stream) {
            return nhwc_conv_tiles_launch(p, splits(p), workspace, stream);
          },
          [=](const NhwcConvParams& p) { return nhwc_conv_tiles_workspace(p, splits(p)); }};
}

NhwcWinogradParams as_winograd(const NhwcConvParams& p) {
  return {p.dtype, p.x, p.transformed, p.bias, p.skip, p.y, p.batch, p.height, p.width, p.channels, p.filter_count, 0};
}

std::string winograd_name(int number) { return std::string("winograd_") + nhwc_winograd_gpu().candidate_name(number); }

Candidate<NhwcConvParams> winograd_candidate(int number) {
  const GpuOp& op = nhwc_winograd_gpu();
  return {winograd_name(number),
          [=, &op](const NhwcConvParams& p) {
            const NhwcWinogradParams params = as_winograd(p);
            return p.transformed != nullptr && op.is_supported(number, &params);
          },
          [=, &op](const NhwcConvParams& p, void* workspace, void* stream) {
            const NhwcWinogradParams params = as_winograd(p);
            return op.run(number, &params, workspace, stream);
          },
          [=, &op](const NhwcConvParams& p) {
            const NhwcWinogradParams params = as_winograd(p);
            return op.workspace_bytes(number, &params);
          }};
}

std::vector<Candidate<NhwcConvParams>> candidates() {
  std::vector<Candidate<NhwcConvParams>> all;  // filled one by one: GCC 12 breaks on nested braces
  all.push_back({"plain", [](const NhwcConvParams&) { return true; },
                 [](const NhwcConvParams& p, void*, void* stream) { return nhwc_conv_launch(p, stream); }});
  all.push_back(tiles_candidate("tiles", [](const NhwcConvParams&) { return int64_t{1}; }));
  all.push_back(tiles_candidate("split_tiles", nhwc_conv_splits));
#if !SD_ORT_HIP
  for (int number = 0; number < kPlans; ++number) all.push_back(library_candidate(number));
  for (int number = 0; number < kPlansAlone; ++number) all.push_back(apart_candidate(number));
#endif
  for (int number = 1; number < nhwc_winograd_gpu().candidate_count(); ++number) {
    all.push_back(winograd_candidate(number));
  }
  return all;
}

// NhwcWinograd's where filters were transformed, else the library's favorite, where it takes the convolution.
std::string default_name(const NhwcConvParams& p) {
  if (p.transformed != nullptr) {
    const NhwcWinogradParams params = as_winograd(p);
    const int number = nhwc_winograd_gpu().default_candidate(&params);
    if (number > 0) return winograd_name(number);
  }
#if !SD_ORT_HIP
  const Candidate<NhwcConvParams> favorite = library_candidate(0);
  if (favorite.is_supported(p)) return favorite.name;
#endif
  return nhwc_conv_tiles_supports(p) ? "split_tiles" : "plain";
}

}  // namespace

const GpuOp& nhwc_conv_gpu() {
  static const TunableOp<NhwcConvParams> op("NhwcConv", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
