// NhwcConv(X, W, B?, skip?; relu) -> Y: ai.onnx::Conv on channels-last tensors, plus skip, and with `relu` Relu of the
// sum. X is (N, H, W, C), W (M, kH, kW, C / group), B (M), skip and Y (N, oH, oW, M). As com.microsoft::NhwcConv, with
// skip and relu.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct NhwcConvParams {
  DType dtype;
  const void* x;        // (batch, height, width, channels)
  const void* filters;  // (filter_count, kernel_height, kernel_width, channels / groups)
  const void* bias;     // (filter_count) or null
  const void* skip;     // as y, or null
  void* y;              // (batch, out_height, out_width, filter_count)
  int64_t batch;
  int64_t height;
  int64_t width;
  int64_t channels;
  int64_t filter_count;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t out_height;
  int64_t out_width;
  int64_t stride_height;
  int64_t stride_width;
  int64_t dilation_height;
  int64_t dilation_width;
  int64_t pad_top;
  int64_t pad_left;
  int64_t pad_bottom;
  int64_t pad_right;
  int64_t groups;
  const void* transformed_filters;  // cached output of WinogradFilters, or null
  int32_t relu;                     // 1: Relu of the sum

  int64_t pixels() const { return batch * out_height * out_width; }                   // of y
  int64_t elements() const { return pixels() * filter_count; }                        // of y
  int64_t inner() const { return kernel_height * kernel_width * channels / groups; }  // products of a sum
  std::string signature() const {
    std::string text = name_of(dtype);
    for (int64_t size : {batch, height, width, channels, filter_count, kernel_height, kernel_width}) {
      text += "_" + std::to_string(size);
    }
    if (stride_height * stride_width > 1) {
      text += "_s" + std::to_string(stride_height) + "x" + std::to_string(stride_width);
    }
    if (dilation_height * dilation_width > 1) {
      text += "_d" + std::to_string(dilation_height) + "x" + std::to_string(dilation_width);
    }
    text += "_p";
    for (int64_t pad : {pad_top, pad_left, pad_bottom, pad_right}) text += std::to_string(pad);
    if (groups > 1) text += "_g" + std::to_string(groups);
    return text + (bias == nullptr ? "" : "_bias") + (skip == nullptr ? "" : "_skip") +
           (transformed_filters == nullptr ? "" : "_transformed") + (relu == 0 ? "" : "_relu");
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(elements()), dtype}}; }
};

enum class NhwcConvActivation : int32_t { kNone, kRelu, kGelu };  // GELU by tanh's approximation

// Sizes and attributes as one kernel argument.
struct NhwcConvShape {
  int32_t height;
  int32_t width;
  int32_t channels;  // of all groups
  int32_t filter_count;
  int32_t kernel_height;
  int32_t kernel_width;
  int32_t out_height;
  int32_t out_width;
  int32_t stride_height;
  int32_t stride_width;
  int32_t dilation_height;
  int32_t dilation_width;
  int32_t pad_top;
  int32_t pad_left;
  int32_t groups;
  NhwcConvActivation activation;
};
NhwcConvShape nhwc_conv_shape(const NhwcConvParams& params);

// Factors of the sums of a convolution in float8: one number (step 0) or one a filter (step 1).
struct NhwcConvScale {
  const float* factors;
  int32_t step;
};

// Whether transformed filters are worth their memory, 16/9 of the filters. NhwcWinograd saves multiplications in
// proportion to channels * filters, and its transforms cost their sum. On an H200 (results/gpu_experiments.md), with
// bias and skip, us of cuDNN and NhwcWinograd: 2 x 32 x 32 x 1280 to 1280 112 and 67, 2 x 64 x 64 x 640 to 640 127 and
// 86; without a gain 2 x 8 x 8 x 1280 to 1280 25 and 25, 2 x 64 x 64 x 320 to 320 34 and 37 and, without skip, 2 x 64 x
// 64 x 320 to 640 60 and 60. NhwcWinograd has no Relu.
inline bool nhwc_conv_prefers_winograd(const NhwcConvParams& p) {
  constexpr int64_t kMinPixels = 512, kMinSaved = 210;
  const bool is_3x3 = p.kernel_height == 3 && p.kernel_width == 3 && p.groups == 1;
  const bool has_unit_steps =
      p.stride_height == 1 && p.stride_width == 1 && p.dilation_height == 1 && p.dilation_width == 1;
  const bool keeps_size = p.pad_top == 1 && p.pad_left == 1 && p.pad_bottom == 1 && p.pad_right == 1;
  return is_3x3 && has_unit_steps && keeps_size && p.relu == 0 && p.dtype != DType::kFloat32 &&
         p.batch * p.height * p.width >= kMinPixels &&
         p.channels * p.filter_count >= kMinSaved * (p.channels + p.filter_count);
}

// Generic kernel: one thread per element, any shape, slow.
const char* nhwc_conv_launch(const NhwcConvParams& params, void* stream);

// Implicit GEMM by matrix instructions, pixels by filters (launch_config.cc). `splits` blocks share the sum of an
// element through float32 sums in `workspace`; one split needs none.
struct NhwcConvTiles {
  static constexpr int64_t kPixels = 128, kFilters = 64, kDepth = 32;  // per block and step
};
bool nhwc_conv_tiles_supports(const NhwcConvParams& params);
int64_t nhwc_conv_target_blocks();                       // that fill the current device: two per multiprocessor
int64_t nhwc_conv_splits(const NhwcConvParams& params);  // enough for these; 1 if tiles suffice
size_t nhwc_conv_tiles_workspace(const NhwcConvParams& params, int64_t splits);
const char* nhwc_conv_tiles_launch(const NhwcConvParams& params, int64_t splits, void* workspace, void* stream);

// Writes Y: the totals of `sums`, (splits, pixels of Y, filter_count), with bias, skip and the activation.
const char* nhwc_conv_add_sums(const NhwcConvParams& params, NhwcConvActivation activation, const float* sums,
                               int64_t splits, void* stream);

// The same of X and W in float8 (e4m3fn), with Y = conv(X, W) * scale + bias + skip, and GELU of it if `gelu`. In
// `params` two adjacent channels count as one, and dtype is that of bias, skip and Y. Not every device has such
// instructions, nor the library code for them.
bool nhwc_conv_has_float8();
bool nhwc_conv_float8_supports(const NhwcConvParams& params);
const char* nhwc_conv_float8_launch(const NhwcConvParams& params, NhwcConvScale scale, bool gelu, int64_t splits,
                                    void* workspace, void* stream);

// The product of x (rows, inner) and a weight (columns, inner) as a 1 x 1 convolution.
NhwcConvParams nhwc_conv_product(DType dtype, const void* x, const void* weight, void* y, int64_t rows, int64_t inner,
                                 int64_t columns);
// As nhwc_conv_tiles_launch, for a product whose weight is (inner, columns), with GELU of the sum if `gelu`.
const char* nhwc_conv_product_launch(const NhwcConvParams& product, bool gelu, int64_t splits, void* workspace,
                                     void* stream);

}  // namespace sd_ort
