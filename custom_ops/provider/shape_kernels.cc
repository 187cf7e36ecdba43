// Operators that reshape (output 0 aliases input 0), Shape, and copies between host and device.
#include "provider/device.h"
#include "provider/kernel.h"

namespace sd_ort {
namespace {

// Writes input 0 to output 0 with another shape. Copies nothing if ONNX Runtime aliased the two.
void copy_reshaped(KernelContext& context, const std::vector<int64_t>& shape) {
  const Tensor x = context.input(0);
  require(element_count(shape) == x.size(), "the shapes have different element counts");
  void* y = context.output(0, shape);
  device::copy(y, x.data, x.size() * element_bytes(x.type), device::Copy::kOnDevice, context.stream());
}

class Identity : public Kernel {
 public:
  explicit Identity(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override { copy_reshaped(context, context.input(0).shape); }
};

class Reshape : public Kernel {
 public:
  explicit Reshape(const OrtKernelInfo* info) : allow_zero_(Attributes(info).integer("allowzero", 0) != 0) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    std::vector<int64_t> shape = context.integers(1);
    int64_t product = 1, inferred = -1;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == 0 && !allow_zero_) shape[i] = x.shape.at(i);
      if (shape[i] == -1) inferred = static_cast<int64_t>(i);
      if (shape[i] != -1) product *= shape[i];
    }
    if (inferred >= 0) shape[inferred] = product == 0 ? 0 : x.size() / product;
    copy_reshaped(context, shape);
  }

 private:
  bool allow_zero_;
};

class Unsqueeze : public Kernel {
 public:
  explicit Unsqueeze(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const std::vector<int64_t> axes = context.integers(1);
    std::vector<int64_t> shape(x.shape.size() + axes.size(), 0);
    for (int64_t axis : axes) shape[normalized_axis(axis, shape.size())] = 1;
    auto from = x.shape.begin();
    for (int64_t& size : shape) {
      if (size == 0) size = *from++;
    }
    copy_reshaped(context, shape);
  }
};

class Squeeze : public Kernel {
 public:
  explicit Squeeze(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    std::vector<bool> removed(x.shape.size(), false);
    const std::vector<int64_t> axes = context.integers(1);
    for (int64_t axis : axes) removed[normalized_axis(axis, x.shape.size())] = true;
    std::vector<int64_t> shape;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      if (!(removed[i] || (axes.empty() && x.shape[i] == 1))) shape.push_back(x.shape[i]);
    }
    copy_reshaped(context, shape);
  }
};

class Flatten : public Kernel {
 public:
  explicit Flatten(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 1)) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const int64_t rank = static_cast<int64_t>(x.shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    int64_t rows = 1;
    for (int64_t i = 0; i < axis; ++i) rows *= x.shape.at(i);
    copy_reshaped(context, {rows, rows == 0 ? 0 : x.size() / rows});
  }

 private:
  int64_t axis_;
};

class Shape : public Kernel {
 public:
  explicit Shape(const OrtKernelInfo* info)
      : start_(Attributes(info).integer("start", 0)), end_(Attributes(info).integer("end", INT64_MAX)) {}
  void compute(KernelContext& context) const override {
    const std::vector<int64_t> shape = context.input(0).shape;
    const int64_t rank = static_cast<int64_t>(shape.size());
    const auto bound = [&](int64_t at) { return std::min(std::max(at < 0 ? at + rank : at, int64_t{0}), rank); };
    const int64_t start = bound(start_), count = std::max(bound(end_) - start, int64_t{0});
    void* y = context.output(0, {count});
    if (count > 0) std::memcpy(y, shape.data() + start, count * sizeof(int64_t));
  }

 private:
  int64_t start_, end_;
};

template <device::Copy direction>
class Memcpy : public Kernel {
 public:
  explicit Memcpy(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    void* y = context.output(0, x.shape);
    device::copy(y, x.data, x.size() * element_bytes(x.type), direction, context.stream());
  }
};

const char* unsupported_axes_attribute(const Node& node) {
  return node.since_version < 13 ? "its axes are an attribute (opset before 13)" : unsupported_elements(node);
}

}  // namespace

void add_shape_kernels(KernelSpecs& specs) {
  const auto add_view = [&](const char* name, auto make, auto unsupported_reason) {
    specs.push_back({"", name, make, unsupported_reason, {1}, false, true});
  };
  add_view("Identity", make_kernel<Identity>, unsupported_elements);
  add_view("Reshape", make_kernel<Reshape>, unsupported_elements);
  add_view("Flatten", make_kernel<Flatten>, unsupported_elements);
  add_view("Squeeze", make_kernel<Squeeze>, unsupported_axes_attribute);
  add_view("Unsqueeze", make_kernel<Unsqueeze>, unsupported_axes_attribute);
  specs.push_back({"", "Shape", make_kernel<Shape>, nullptr, {}, true});
  specs.push_back({"", "MemcpyFromHost", make_kernel<Memcpy<device::Copy::kToDevice>>, nullptr, {0}});
  specs.push_back({"", "MemcpyToHost", make_kernel<Memcpy<device::Copy::kToHost>>, nullptr, {}, true});
}

}  // namespace sd_ort
