// What only gives a tensor another shape (its output is its input's memory), reads a shape, or copies between host and
// device.
#include "provider/device.h"
#include "provider/kernel.h"

namespace sd_ort {
namespace {

// Output 0 with input 0's bytes; where ONNX Runtime aliased the two there is nothing to copy.
void pass_on(Call& call, const std::vector<int64_t>& shape) {
  const Tensor x = call.input(0);
  require(count_of(shape) == x.size(), "the shapes have different numbers of elements");
  void* y = call.output(0, shape);
  device::copy(y, x.data, x.size() * element_bytes(x.type), device::Copy::kOnDevice, call.stream());
}

class Identity : public Kernel {
 public:
  explicit Identity(const OrtKernelInfo*) {}
  void compute(Call& call) const override { pass_on(call, call.input(0).shape); }
};

class Reshape : public Kernel {
 public:
  explicit Reshape(const OrtKernelInfo* info) : zero_is_zero_(Attributes(info).integer("allowzero", 0) != 0) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    std::vector<int64_t> shape = call.integers(1);
    int64_t known = 1, open = -1;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == 0 && !zero_is_zero_) shape[i] = x.shape.at(i);
      if (shape[i] == -1) open = static_cast<int64_t>(i);
      if (shape[i] != -1) known *= shape[i];
    }
    if (open >= 0) shape[open] = known == 0 ? 0 : x.size() / known;
    pass_on(call, shape);
  }

 private:
  bool zero_is_zero_;
};

class Unsqueeze : public Kernel {
 public:
  explicit Unsqueeze(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    const std::vector<int64_t> axes = call.integers(1);
    std::vector<int64_t> shape(x.shape.size() + axes.size(), 0);
    for (int64_t axis : axes) shape[axis_of(axis, shape.size())] = 1;
    auto from = x.shape.begin();
    for (int64_t& size : shape) {
      if (size == 0) size = *from++;
    }
    pass_on(call, shape);
  }
};

class Squeeze : public Kernel {
 public:
  explicit Squeeze(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    std::vector<bool> out(x.shape.size(), false);
    const std::vector<int64_t> axes = call.integers(1);
    for (int64_t axis : axes) out[axis_of(axis, x.shape.size())] = true;
    std::vector<int64_t> shape;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      if (!(out[i] || (axes.empty() && x.shape[i] == 1))) shape.push_back(x.shape[i]);
    }
    pass_on(call, shape);
  }
};

class Flatten : public Kernel {
 public:
  explicit Flatten(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 1)) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    const int64_t rank = static_cast<int64_t>(x.shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    int64_t rows = 1;
    for (int64_t i = 0; i < axis; ++i) rows *= x.shape.at(i);
    pass_on(call, {rows, rows == 0 ? 0 : x.size() / rows});
  }

 private:
  int64_t axis_;
};

class Shape : public Kernel {
 public:
  explicit Shape(const OrtKernelInfo* info)
      : start_(Attributes(info).integer("start", 0)), end_(Attributes(info).integer("end", INT64_MAX)) {}
  void compute(Call& call) const override {
    const std::vector<int64_t> shape = call.input(0).shape;
    const int64_t rank = static_cast<int64_t>(shape.size());
    const auto bound = [&](int64_t at) { return std::min(std::max(at < 0 ? at + rank : at, int64_t{0}), rank); };
    const int64_t start = bound(start_), count = std::max(bound(end_) - start, int64_t{0});
    void* y = call.output(0, {count});
    if (count > 0) std::memcpy(y, shape.data() + start, count * sizeof(int64_t));
  }

 private:
  int64_t start_, end_;
};

template <device::Copy direction>
class Memcpy : public Kernel {
 public:
  explicit Memcpy(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    void* y = call.output(0, x.shape);
    device::copy(y, x.data, x.size() * element_bytes(x.type), direction, call.stream());
  }
};

const char* refuses_axes_as_attribute(const Node& node) {
  return node.since_version < 13 ? "axes as an attribute, which opsets before 13 have" : refuses_elements(node);
}

}  // namespace

void add_shape_kernels(KernelSpecs& specs) {
  const auto add_view = [&](const char* name, auto make, auto refuses) {
    specs.push_back({"", name, make, refuses, {1}, false, true});
  };
  add_view("Identity", make_kernel<Identity>, refuses_elements);
  add_view("Reshape", make_kernel<Reshape>, refuses_elements);
  add_view("Flatten", make_kernel<Flatten>, refuses_elements);
  add_view("Squeeze", make_kernel<Squeeze>, refuses_axes_as_attribute);
  add_view("Unsqueeze", make_kernel<Unsqueeze>, refuses_axes_as_attribute);
  specs.push_back({"", "Shape", make_kernel<Shape>, nullptr, {}, true});
  specs.push_back({"", "MemcpyFromHost", make_kernel<Memcpy<device::Copy::kToDevice>>, nullptr, {0}});
  specs.push_back({"", "MemcpyToHost", make_kernel<Memcpy<device::Copy::kToHost>>, nullptr, {}, true});
}

}  // namespace sd_ort
