// Binding of SubpixelShuffle.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/subpixel_shuffle/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(subpixel_shuffle, SubpixelShuffleParams)

struct SubpixelShuffleBinding : BindingBase<SubpixelShuffleParams, subpixel_shuffle_cpu> {
  static constexpr const char* kName = "SubpixelShuffle";
  static constexpr Port kInputs[] = {{Port::kT}, {Port::kT, true}};  // X, bias
  static constexpr Port kOutputs[] = {{Port::kT}};                   // Y

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    if (dims.size() != 4) return;
    for (size_t axis : {1, 2}) dims[axis] = dims[axis].value > 0 ? Dim{upsampled(dims[axis].value), ""} : Dim{};
    dims[3] = dims[3].known() ? Dim{dims[3].value / 4, ""} : Dim{};
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0), bias = tensors.input(1);
    require(x.shape.size() == 4 && x.shape[1] > 0 && x.shape[2] > 0 && x.shape[3] % 4 == 0,
            "SubpixelShuffle: X must be (N, H + 1, W + 1, 4 C)");
    params.batch = x.shape[0];
    params.height = x.shape[1] - 1;
    params.width = x.shape[2] - 1;
    params.channels = x.shape[3] / 4;
    require(!bias || bias.has_shape({params.channels}), "SubpixelShuffle: bias must have one element a channel of Y");
    params.x = x.data;
    params.bias = bias.data;
    params.y = tensors.output(0, {params.batch, upsampled(x.shape[1]), upsampled(x.shape[2]), params.channels});
  }

 private:
  static int64_t upsampled(int64_t size) { return multiply_sizes(size - 1, 2); }
};

}  // namespace sd_ort
