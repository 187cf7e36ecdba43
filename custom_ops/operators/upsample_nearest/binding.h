// Binding of UpsampleNearest.
#pragma once

#include "common/cpu.h"
#include "common/ort_op.h"
#include "operators/upsample_nearest/op.h"

namespace sd_ort {

SD_ORT_CPU_KERNEL(upsample_nearest, UpsampleNearestParams)

struct UpsampleNearestBinding : BindingBase<UpsampleNearestParams, upsample_nearest_cpu> {
  static constexpr const char* kName = "UpsampleNearest";
  static constexpr Port kInputs[] = {{Port::kT}};   // X
  static constexpr Port kOutputs[] = {{Port::kT}};  // Y

  static Params attributes(const Attributes& attributes) {
    Params params{};
    params.scale_height = attributes.required_integer("scale_height");
    params.scale_width = attributes.required_integer("scale_width");
    for (int64_t scale : {params.scale_height, params.scale_width}) {
      require(scale >= 1 && scale <= INT32_MAX, "UpsampleNearest: a scale must be 1 or more, and below 2^31");
    }
    return params;
  }

  static void infer(Shapes& shapes) {
    if (!shapes.has(0)) return;
    std::vector<Dim> dims = shapes.input(0);
    if (dims.size() != 4) return;
    dims[1] = repeated(dims[1], shapes.required_integer("scale_height"));
    dims[2] = repeated(dims[2], shapes.required_integer("scale_width"));
    shapes.set_output(dims);
  }

  static void bind(Tensors& tensors, Params& params) {
    const Tensor x = tensors.input(0);
    require(x.shape.size() == 4, "UpsampleNearest: X must be (N, H, W, C)");
    params.rows = x.size() == 0 ? 0 : x.shape[0] * x.shape[1];
    params.width = x.shape[2];
    params.channels = x.shape[3];
    params.x = x.data;
    params.y = tensors.output(0, {x.shape[0], multiply_sizes(x.shape[1], params.scale_height),
                                  multiply_sizes(x.shape[2], params.scale_width), x.shape[3]});
  }

 private:
  static Dim repeated(const Dim& dim, int64_t times) {
    if (times == 1) return dim;
    return dim.known() && times > 0 ? Dim{multiply_sizes(dim.value, times), ""} : Dim{};
  }
};

}  // namespace sd_ort
