// Candidates of QuantizedNhwcConv: the generic kernel, warpgroup instructions on Hopper, NhwcConv's tile kernel of
// float8 on other GPUs that multiply it, and of X and W in 16 bits on all others.
#include "common/check.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/nhwc_conv/op.h"
#include "operators/quantized_nhwc_conv/op.h"

namespace sd_ort {
namespace {

using Params = QuantizedNhwcConvParams;

constexpr size_t kAlignment = 256;

size_t aligned(int64_t elements, DType type) { return ceil_div(elements * size_of(type), kAlignment) * kAlignment; }
size_t x_bytes(const Params& p) { return aligned(p.pixels() * p.channels, p.dtype); }
size_t filter_bytes(const Params& p) { return aligned(p.filter_count * p.inner(), p.dtype); }

NhwcConvParams convolution(const Params& p, const void* x, const void* filters, int64_t channels) {
  NhwcConvParams conv{};
  conv.dtype = p.dtype;
  conv.x = x;
  conv.filters = filters;
  conv.bias = p.bias;
  conv.skip = p.skip;
  conv.y = p.y;
  conv.batch = p.batch;
  conv.height = conv.out_height = p.height;
  conv.width = conv.out_width = p.width;
  conv.channels = channels;
  conv.filter_count = p.filter_count;
  conv.kernel_height = conv.kernel_width = 3;
  conv.stride_height = conv.stride_width = conv.dilation_height = conv.dilation_width = conv.groups = 1;
  conv.pad_top = conv.pad_left = conv.pad_bottom = conv.pad_right = 1;
  return conv;
}

// The call for X and W in p.dtype, at the beginning of the workspace.
NhwcConvParams dequantized(const Params& p, void* workspace) {
  return convolution(p, workspace, static_cast<char*>(workspace) + x_bytes(p), p.channels);
}

// The call for pairs of channels.
NhwcConvParams paired(const Params& p) { return convolution(p, p.x, p.filters, p.channels / 2); }

Candidate<Params> float8_tiles() {
  const auto supports = [](const Params& p) {
    return p.pixels() > 0 && p.channels % 2 == 0 && nhwc_conv_float8_supports(paired(p));
  };
  const auto run = [](const Params& p, void* workspace, void* stream) {
    const NhwcConvParams conv = paired(p);
    return nhwc_conv_float8_launch(conv, {p.scale, p.scales == 1 ? 0 : 1}, false, nhwc_conv_splits(conv), workspace,
                                   stream);
  };
  const auto bytes = [](const Params& p) {
    const NhwcConvParams conv = paired(p);
    return nhwc_conv_tiles_workspace(conv, nhwc_conv_splits(conv));
  };
  return {"float8_tiles", supports, run, bytes};
}

Candidate<Params> tiles() {
  const auto supports = [](const Params& p) {
    return p.pixels() > 0 && nhwc_conv_tiles_supports(dequantized(p, nullptr));
  };
  const auto run = [](const Params& p, void* workspace, void* stream) -> const char* {
    const NhwcConvParams conv = dequantized(p, workspace);
    char* const end = static_cast<char*>(workspace) + x_bytes(p) + filter_bytes(p);
    SD_ORT_RETURN_ERROR(
        quantized_nhwc_conv_dequantize(p, workspace, static_cast<char*>(workspace) + x_bytes(p), stream));
    return nhwc_conv_tiles_launch(conv, nhwc_conv_splits(conv), end, stream);
  };
  const auto bytes = [](const Params& p) {
    const NhwcConvParams conv = dequantized(p, nullptr);
    return x_bytes(p) + filter_bytes(p) + nhwc_conv_tiles_workspace(conv, nhwc_conv_splits(conv));
  };
  return {"tiles", supports, run, bytes};
}

#if !SD_ORT_HIP
Candidate<Params> warpgroups(int columns) {
  return {"warpgroups_" + std::to_string(columns),
          [=](const Params& p) { return quantized_nhwc_conv_supports_warpgroups(p, columns); },
          [=](const Params& p, void*, void* stream) { return quantized_nhwc_conv_warpgroups(p, columns, stream); }};
}

Candidate<Params> split_warpgroups(int columns) {
  const auto supports = [=](const Params& p) {
    return quantized_nhwc_conv_supports_warpgroups(p, columns) && quantized_nhwc_conv_splits(p, columns) > 1;
  };
  const auto run = [=](const Params& p, void* workspace, void* stream) -> const char* {
    const int64_t splits = quantized_nhwc_conv_splits(p, columns);
    float* const sums = static_cast<float*>(workspace);
    SD_ORT_RETURN_ERROR(quantized_nhwc_conv_split_warpgroups(p, columns, splits, sums, stream));
    return nhwc_conv_add_sums(dequantized(p, nullptr), NhwcConvActivation::kNone, sums, splits, stream);
  };
  const auto bytes = [=](const Params& p) {
    return static_cast<size_t>(quantized_nhwc_conv_splits(p, columns) * p.pixels() * p.filter_count) * sizeof(float);
  };
  return {"split_warpgroups_" + std::to_string(columns), supports, run, bytes};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all;
  all.push_back(generic_candidate(quantized_nhwc_conv_launch));
  all.push_back(float8_tiles());
  all.push_back(tiles());
#if !SD_ORT_HIP
  for (int columns : {128, 160}) {
    all.push_back(warpgroups(columns));
    all.push_back(split_warpgroups(columns));
  }
#endif
  return all;
}

// 160 filters a tile where they divide them: the channels of Stable Diffusion's U-Nets are multiples of 320.
std::string default_name(const Params& p) {
#if !SD_ORT_HIP
  const int columns = p.filter_count % 160 == 0 ? 160 : 128;
  for (const Candidate<Params>& fast : {split_warpgroups(columns), warpgroups(columns)}) {
    if (fast.is_supported(p)) return fast.name;
  }
#endif
  if (float8_tiles().is_supported(p)) return "float8_tiles";
  return tiles().is_supported(p) ? "tiles" : "generic";
}

}  // namespace

const GpuOp& quantized_nhwc_conv_gpu() {
  static const TunableOp<Params> op("QuantizedNhwcConv", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
