// LinearAdd by the tile kernel of NhwcConv, as a 1 x 1 convolution whose filters are a matrix (inner, columns).
#include "operators/linear_add/op.h"
#include "operators/nhwc_conv/op.h"

namespace sd_ort {
namespace {

NhwcConvParams as_conv(const LinearAddParams& p) {
  NhwcConvParams conv = nhwc_conv_product(p.dtype, p.x, p.weight, p.y, p.rows, p.inner, p.columns);
  conv.bias = p.bias;
  conv.skip = p.skip;
  return conv;
}

}  // namespace

bool linear_add_tiles_supports(const LinearAddParams& p) { return nhwc_conv_tiles_supports(as_conv(p)); }

size_t linear_add_tiles_workspace(const LinearAddParams& p) {
  const NhwcConvParams conv = as_conv(p);
  return nhwc_conv_tiles_workspace(conv, nhwc_conv_splits(conv));
}

const char* linear_add_tiles_launch(const LinearAddParams& p, void* workspace, void* stream) {
  const NhwcConvParams conv = as_conv(p);
  return nhwc_conv_product_launch(conv, p.gelu != 0, nhwc_conv_splits(conv), workspace, stream);
}

}  // namespace sd_ort
