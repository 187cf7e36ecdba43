// Supported shapes and launch parameters of the tile kernel of NhwcConv.
#include <algorithm>

#include "operators/nhwc_conv/op.h"

namespace sd_ort {
namespace {

constexpr int64_t kMaxSplits = 16;
constexpr int64_t kMinStepsPerSplit = 16;  // amortizes the store of the sums

int64_t steps(const NhwcConvParams& p) { return ceil_div(p.inner(), NhwcConvTiles::kDepth); }

}  // namespace

NhwcConvShape nhwc_conv_shape(const NhwcConvParams& p) {
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  return {narrow(p.height),          narrow(p.width),
          narrow(p.channels),        narrow(p.filter_count),
          narrow(p.kernel_height),   narrow(p.kernel_width),
          narrow(p.out_height),      narrow(p.out_width),
          narrow(p.stride_height),   narrow(p.stride_width),
          narrow(p.dilation_height), narrow(p.dilation_width),
          narrow(p.pad_top),         narrow(p.pad_left),
          narrow(p.groups),          p.relu != 0 ? NhwcConvActivation::kRelu : NhwcConvActivation::kNone};
}

NhwcConvParams nhwc_conv_product(DType dtype, const void* x, const void* weight, void* y, int64_t rows, int64_t inner,
                                 int64_t columns) {
  NhwcConvParams product{};
  product.dtype = dtype;
  product.x = x;
  product.filters = weight;
  product.y = y;
  product.batch = product.height = product.out_height = 1;
  product.kernel_height = product.kernel_width = product.groups = 1;
  product.stride_height = product.stride_width = product.dilation_height = product.dilation_width = 1;
  product.width = product.out_width = rows;
  product.channels = inner;
  product.filter_count = columns;
  return product;
}

bool nhwc_conv_tiles_supports(const NhwcConvParams& p) {
  const bool is_small =
      p.height * p.width * p.channels < INT32_MAX && p.filter_count * p.inner() < INT32_MAX && p.elements() < INT32_MAX;
  return p.dtype != DType::kFloat32 && p.groups == 1 && p.inner() > 0 && is_small;
}

bool nhwc_conv_float8_supports(const NhwcConvParams& p) {
  return are_aligned<2>(p.x, p.filters) && nhwc_conv_tiles_supports(p) && nhwc_conv_has_float8();
}

int64_t nhwc_conv_splits(const NhwcConvParams& p) {
  const int64_t blocks =
      ceil_div(p.pixels(), NhwcConvTiles::kPixels) * ceil_div(p.filter_count, NhwcConvTiles::kFilters);
  if (blocks == 0) return 1;
  return std::max<int64_t>(1, std::min({nhwc_conv_target_blocks() / blocks, steps(p) / kMinStepsPerSplit, kMaxSplits}));
}

size_t nhwc_conv_tiles_workspace(const NhwcConvParams& p, int64_t splits) {
  return splits == 1 ? 0 : static_cast<size_t>(splits * p.elements()) * sizeof(float);
}

}  // namespace sd_ort
