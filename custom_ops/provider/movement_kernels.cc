// What only moves elements: Transpose, Concat, Split, Slice, Expand, Gather, GatherND, Pad, Resize, ConstantOfShape.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "provider/kernel.h"
#include "provider/kernels/kernels.h"

namespace sd_ort {
namespace {

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

void require_axes(size_t rank) { require(rank <= kMostAxes, "a tensor has more than 8 axes"); }

// Copies a box of `sizes`; offsets and strides in elements.
void copy_box(const Tensor& like, const std::vector<int64_t>& sizes, int64_t from_offset,
              const std::vector<int64_t>& from_strides, void* to, int64_t to_offset,
              const std::vector<int64_t>& to_strides, void* stream) {
  require_axes(sizes.size());
  if (count_of(sizes) == 0) return;
  const int64_t bytes = static_cast<int64_t>(element_bytes(like.type));
  StridedCopy copy{};
  copy.from = static_cast<const char*>(like.data) + from_offset * bytes;
  copy.to = static_cast<char*>(to) + to_offset * bytes;
  copy.element_bytes = static_cast<int>(bytes);
  copy.axes = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), copy.sizes);
  std::copy(from_strides.begin(), from_strides.end(), copy.from_strides);
  std::copy(to_strides.begin(), to_strides.end(), copy.to_strides);
  launched(strided_copy(copy, stream));
}

// Concat of `parts` along an axis, or Split into them: `sizes` are theirs along it, `joined` has all of them.
void join_parts(const Tensor& like, void* joined, const std::vector<void*>& parts, const std::vector<int64_t>& sizes,
                const std::vector<int64_t>& shape, int64_t axis, bool apart, void* stream) {
  const int64_t inner = count_of({shape.begin() + axis + 1, shape.end()});
  require(shape[axis] * inner <= INT32_MAX, "a row of the joined tensor has more than 2^31 elements");
  if (count_of(shape) == 0) return;
  Join j{};
  j.joined = joined;
  j.width = static_cast<int32_t>(shape[axis] * inner);
  j.element_bytes = static_cast<int>(element_bytes(like.type));
  j.rows = count_of({shape.begin(), shape.begin() + axis});
  j.apart = apart;
  for (size_t i = 0; i < parts.size(); ++i) {
    j.parts[j.count++] = parts[i];
    j.begins[j.count] = j.begins[j.count - 1] + static_cast<int32_t>(sizes[i] * inner);
    if (j.count < kMostParts && i + 1 < parts.size()) continue;
    launched(join(j, stream));
    j.begins[0] = j.begins[j.count];
    j.count = 0;
  }
}

class Transpose : public Kernel {
 public:
  explicit Transpose(const OrtKernelInfo* info) : perm_(Attributes(info).integers("perm", {})) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    const std::vector<int64_t> strides = strides_of(x.shape);
    std::vector<int64_t> shape, from;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      const size_t axis = perm_.empty() ? x.shape.size() - 1 - i : static_cast<size_t>(perm_.at(i));
      shape.push_back(x.shape.at(axis));
      from.push_back(strides[axis]);
    }
    void* y = call.output(0, shape);
    copy_box(x, shape, 0, from, y, 0, strides_of(shape), call.stream());
  }

 private:
  std::vector<int64_t> perm_;
};

class Concat : public Kernel {
 public:
  explicit Concat(const OrtKernelInfo* info) : axis_(Attributes(info).required_integer("axis")) {}
  void compute(Call& call) const override {
    std::vector<int64_t> shape = call.input(0).shape;
    const int64_t axis = axis_of(axis_, shape.size());
    shape[axis] = 0;
    for (size_t i = 0; i < call.inputs(); ++i) shape[axis] += call.input(i).shape.at(axis);
    void* y = call.output(0, shape);
    std::vector<void*> parts;
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < call.inputs(); ++i) {
      const Tensor x = call.input(i);
      parts.push_back(const_cast<void*>(x.data));
      sizes.push_back(x.shape[axis]);
    }
    join_parts(call.input(0), y, parts, sizes, shape, axis, false, call.stream());
  }

 private:
  int64_t axis_;
};

class Split : public Kernel {
 public:
  explicit Split(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 0)) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    const int64_t axis = axis_of(axis_, x.shape.size());
    std::vector<int64_t> sizes = call.integers(1);
    const int64_t parts = static_cast<int64_t>(call.outputs());
    if (sizes.empty()) {
      const int64_t chunk = (x.shape[axis] + parts - 1) / parts;
      for (int64_t left = x.shape[axis]; static_cast<int64_t>(sizes.size()) < parts; left -= chunk) {
        sizes.push_back(std::max<int64_t>(0, std::min(chunk, left)));
      }
    }
    require(static_cast<int64_t>(sizes.size()) == parts &&
                std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == x.shape[axis],
            "Split: the sizes do not add up");
    std::vector<void*> outputs;
    for (size_t i = 0; i < call.outputs(); ++i) {
      std::vector<int64_t> shape = x.shape;
      shape[axis] = sizes[i];
      outputs.push_back(call.output(i, shape));
    }
    join_parts(x, const_cast<void*>(x.data), outputs, sizes, x.shape, axis, true, call.stream());
  }

 private:
  int64_t axis_;
};

class Slice : public Kernel {
 public:
  explicit Slice(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    const std::vector<int64_t> starts = call.integers(1), ends = call.integers(2);
    std::vector<int64_t> axes = call.integers(3), steps = call.integers(4);
    std::vector<int64_t> shape = x.shape, strides = strides_of(x.shape);
    int64_t offset = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t axis = axes.empty() ? static_cast<int64_t>(i) : axis_of(axes[i], shape.size());
      const int64_t step = steps.empty() ? 1 : steps[i], size = x.shape[axis];
      require(step != 0, "Slice: a step is 0");
      const int64_t least = step > 0 ? 0 : -1, most = step > 0 ? size : size - 1;
      const auto bound = [&](int64_t at) { return std::min(std::max(at < 0 ? at + size : at, least), most); };
      const int64_t start = bound(starts[i]), end = ends[i] < -size && step < 0 ? -1 : bound(ends[i]);
      const int64_t span = step > 0 ? end - start : start - end, length = std::abs(step);
      shape[axis] = span > 0 ? (span + length - 1) / length : 0;
      offset += start * strides[axis];
      strides[axis] *= step;
    }
    void* y = call.output(0, shape);
    copy_box(x, shape, offset, strides, y, 0, strides_of(shape), call.stream());
  }
};

class Expand : public Kernel {
 public:
  explicit Expand(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0);
    std::vector<int64_t> shape = call.integers(1);
    if (shape.size() < x.shape.size()) shape.insert(shape.begin(), x.shape.size() - shape.size(), 1);
    std::vector<int64_t> from(shape.size(), 0);
    const std::vector<int64_t> strides = strides_of(x.shape);
    for (size_t i = 0; i < x.shape.size(); ++i) {
      const size_t at = shape.size() - x.shape.size() + i;
      require(shape[at] == 1 || x.shape[i] == 1 || shape[at] == x.shape[i], "Expand: the shapes do not broadcast");
      if (x.shape[i] != 1) from[at] = strides[i];
      if (shape[at] == 1) shape[at] = x.shape[i];
    }
    void* y = call.output(0, shape);
    copy_box(x, shape, 0, from, y, 0, strides_of(shape), call.stream());
  }
};

class Gather : public Kernel {
 public:
  explicit Gather(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 0)) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), indices = call.input(1);
    const int64_t axis = axis_of(axis_, x.shape.size());
    GatherCall c{};
    std::vector<int64_t> shape(x.shape.begin(), x.shape.begin() + axis);
    c.outer = count_of(shape);
    shape.insert(shape.end(), indices.shape.begin(), indices.shape.end());
    const std::vector<int64_t> after(x.shape.begin() + axis + 1, x.shape.end());
    shape.insert(shape.end(), after.begin(), after.end());
    c.from = x.data;
    c.indices = indices.data;
    c.wide = indices.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    c.size = x.shape[axis];
    c.count = indices.size();
    c.inner = count_of(after);
    c.to = call.output(0, shape);
    if (count_of(shape) > 0) launched(gather(c, call.stream()));
  }

 private:
  int64_t axis_;
};

class GatherNd : public Kernel {
 public:
  explicit GatherNd(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), indices = call.input(1);
    GatherNdCall c{};
    c.depth = static_cast<int>(indices.shape.back());
    require_axes(x.shape.size());
    require(c.depth <= static_cast<int>(x.shape.size()), "GatherND: the tuples are longer than the axes");
    std::vector<int64_t> shape(indices.shape.begin(), indices.shape.end() - 1);
    c.count = count_of(shape);
    const std::vector<int64_t> strides = strides_of(x.shape);
    for (int axis = 0; axis < c.depth; ++axis) {
      c.sizes[axis] = x.shape[axis];
      c.strides[axis] = strides[axis];
    }
    shape.insert(shape.end(), x.shape.begin() + c.depth, x.shape.end());
    c.inner = c.count == 0 ? 0 : count_of(shape) / c.count;
    c.from = x.data;
    c.indices = static_cast<const int64_t*>(indices.data);
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    c.to = call.output(0, shape);
    if (count_of(shape) > 0) launched(gather_nd(c, call.stream()));
  }
};

class Pad : public Kernel {
 public:
  explicit Pad(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), value = call.input(2);
    const std::vector<int64_t> pads = call.integers(1), axes = call.integers(3);
    require_axes(x.shape.size());
    PadCall c{};
    std::vector<int64_t> shape = x.shape;
    const size_t count = pads.size() / 2;
    for (size_t i = 0; i < count; ++i) {
      const int64_t axis = axes.empty() ? static_cast<int64_t>(i) : axis_of(axes[i], shape.size());
      c.before[axis] = pads[i];
      shape[axis] += pads[i] + pads[count + i];
    }
    c.from = x.data;
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    if (value) std::memcpy(&c.value, value.data, element_bytes(x.type));
    c.axes = static_cast<int>(shape.size());
    std::copy(x.shape.begin(), x.shape.end(), c.from_sizes);
    std::copy(shape.begin(), shape.end(), c.to_sizes);
    c.to = call.output(0, shape);
    if (count_of(shape) > 0) launched(pad(c, call.stream()));
  }
};

class Resize : public Kernel {
 public:
  explicit Resize(const OrtKernelInfo*) {}
  void compute(Call& call) const override {
    const Tensor x = call.input(0), scales = call.input(2);
    std::vector<int64_t> shape = call.integers(3);
    require_axes(x.shape.size());
    ResizeCall c{};
    c.axes = static_cast<int>(x.shape.size());
    const bool by_size = !shape.empty();
    require(by_size || scales.size() == c.axes, "Resize: one scale per axis is needed");
    shape.resize(x.shape.size());
    for (int axis = 0; axis < c.axes; ++axis) {
      const float scale = by_size ? static_cast<float>(shape[axis]) / static_cast<float>(x.shape[axis])
                                  : static_cast<const float*>(scales.data)[axis];
      if (!by_size) shape[axis] = static_cast<int64_t>(std::floor(static_cast<float>(x.shape[axis]) * scale));
      c.steps[axis] = 1.f / scale;
      c.from_sizes[axis] = x.shape[axis];
      c.to_sizes[axis] = shape[axis];
    }
    c.from = x.data;
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    c.to = call.output(0, shape);
    if (count_of(shape) > 0) launched(resize_nearest(c, call.stream()));
  }
};

// Its value is a tensor attribute: one element, float32 0 by default.
class ConstantOfShape : public Kernel {
 public:
  explicit ConstantOfShape(const OrtKernelInfo* info) {
    OrtAllocator* allocator = nullptr;
    check(ort_api->GetAllocatorWithDefaultOptions(&allocator));
    Owned<OrtValue> value(ort_api->ReleaseValue);
    OrtStatus* status = ort_api->KernelInfoGetAttribute_tensor(info, "value", allocator, value.out());
    if (status != nullptr) {
      ort_api->ReleaseStatus(status);
      return;
    }
    Owned<OrtTensorTypeAndShapeInfo> shape(ort_api->ReleaseTensorTypeAndShapeInfo);
    check(ort_api->GetTensorTypeAndShape(value.get(), shape.out()));
    ONNXTensorElementDataType type;
    check(ort_api->GetTensorElementType(shape.get(), &type));
    const void* data = nullptr;
    check(ort_api->GetTensorData(value.get(), &data));
    bytes_ = element_bytes(type);
    std::memcpy(&value_, data, bytes_);
  }
  void compute(Call& call) const override {
    const std::vector<int64_t> shape = call.integers(0);
    void* y = call.output(0, shape);
    launched(fill(y, count_of(shape), &value_, static_cast<int>(bytes_), call.stream()));
  }

 private:
  uint64_t value_ = 0;
  size_t bytes_ = 4;
};

const char* refuses_constant(const Node& node) {
  return element_bytes(node.outputs.at(0).type) == 0 ? "its type has no fixed size" : nullptr;
}
const char* refuses_split(const Node& node) {
  if (node.since_version < 13) return "sizes as an attribute, which opsets before 13 have";
  return refuses_elements(node);
}
const char* refuses_slice(const Node& node) {
  if (node.since_version < 10) return "bounds as attributes, which opsets before 10 have";
  return refuses_elements(node);
}
const char* refuses_gather_nd(const Node& node) {
  if (node.integer("batch_dims", 0) != 0) return "it has batch axes";
  return refuses_elements(node);
}
const char* refuses_pad(const Node& node) {
  if (node.since_version < 11) return "pads as an attribute, which opsets before 11 have";
  if (node.text("mode", "constant") != "constant") return "its mode is not constant";
  return refuses_elements(node);
}
const char* refuses_resize(const Node& node) {
  if (node.since_version < 11) return "scales as its second input, which opsets before 11 have";
  if (node.has("axes")) return "it names axes";
  if (node.integer("antialias", 0) != 0) return "it smooths";
  if (node.text("keep_aspect_ratio_policy", "stretch") != "stretch") return "it keeps the aspect ratio";
  const bool plain = node.text("mode", "nearest") == "nearest" &&
                     node.text("coordinate_transformation_mode", "half_pixel") == "asymmetric" &&
                     node.text("nearest_mode", "round_prefer_floor") == "floor";
  return plain ? refuses_elements(node) : "it does not take the nearest element by asymmetric coordinates";
}

}  // namespace

void add_movement_kernels(KernelSpecs& specs) {
  specs.push_back({"", "Transpose", make_kernel<Transpose>, refuses_elements});
  specs.push_back({"", "Concat", make_kernel<Concat>, refuses_elements});
  specs.push_back({"", "Split", make_kernel<Split>, refuses_split, {1}});
  specs.push_back({"", "Slice", make_kernel<Slice>, refuses_slice, {1, 2, 3, 4}});
  specs.push_back({"", "Expand", make_kernel<Expand>, refuses_elements, {1}});
  specs.push_back({"", "Gather", make_kernel<Gather>, refuses_elements});
  specs.push_back({"", "GatherND", make_kernel<GatherNd>, refuses_gather_nd});
  specs.push_back({"", "Pad", make_kernel<Pad>, refuses_pad, {1, 2, 3}});
  specs.push_back({"", "Resize", make_kernel<Resize>, refuses_resize, {1, 2, 3}});
  specs.push_back({"", "ConstantOfShape", make_kernel<ConstantOfShape>, refuses_constant, {0}});
}

}  // namespace sd_ort
