// Operators that copy elements: Transpose, Concat, Split, Slice, Expand, Gather, GatherND, Pad, Resize,
// ConstantOfShape.
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

void require_axes(size_t rank) { require(rank <= kMaxAxes, "a tensor has more than 8 axes"); }

// Copies a strided block of shape `sizes`; offsets and strides are in elements.
void copy_strided(const Tensor& x, const std::vector<int64_t>& sizes, int64_t from_offset,
                  const std::vector<int64_t>& from_strides, void* to, int64_t to_offset,
                  const std::vector<int64_t>& to_strides, void* stream) {
  require_axes(sizes.size());
  if (element_count(sizes) == 0) return;
  const int64_t bytes = static_cast<int64_t>(element_bytes(x.type));
  StridedCopy copy{};
  copy.from = static_cast<const char*>(x.data) + from_offset * bytes;
  copy.to = static_cast<char*>(to) + to_offset * bytes;
  copy.element_bytes = static_cast<int>(bytes);
  copy.axes = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), copy.sizes);
  std::copy(from_strides.begin(), from_strides.end(), copy.from_strides);
  std::copy(to_strides.begin(), to_strides.end(), copy.to_strides);
  check_launch(strided_copy(copy, stream));
}

// Concat of `parts` along an axis, or Split into them. `sizes` are their sizes along the axis; `full` has `shape`.
void launch_concat(const Tensor& x, void* full, const std::vector<void*>& parts, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& shape, int64_t axis, bool split, void* stream) {
  const int64_t inner = element_count({shape.begin() + axis + 1, shape.end()});
  require(shape[axis] * inner <= INT32_MAX, "the concatenated axes have more than 2^31 elements");
  if (element_count(shape) == 0) return;
  ConcatCall c{};
  c.full = full;
  c.width = static_cast<int32_t>(shape[axis] * inner);
  c.element_bytes = static_cast<int>(element_bytes(x.type));
  c.rows = element_count({shape.begin(), shape.begin() + axis});
  c.split = split;
  for (size_t i = 0; i < parts.size(); ++i) {
    c.parts[c.count++] = parts[i];
    c.begins[c.count] = c.begins[c.count - 1] + static_cast<int32_t>(sizes[i] * inner);
    if (c.count < kMaxParts && i + 1 < parts.size()) continue;
    check_launch(concat(c, stream));
    c.begins[0] = c.begins[c.count];
    c.count = 0;
  }
}

class Transpose : public Kernel {
 public:
  explicit Transpose(const OrtKernelInfo* info) : perm_(Attributes(info).integers("perm", {})) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const std::vector<int64_t> strides = strides_of(x.shape);
    std::vector<int64_t> shape, from;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      const size_t axis = perm_.empty() ? x.shape.size() - 1 - i : static_cast<size_t>(perm_.at(i));
      shape.push_back(x.shape.at(axis));
      from.push_back(strides[axis]);
    }
    void* y = context.output(0, shape);
    copy_strided(x, shape, 0, from, y, 0, strides_of(shape), context.stream());
  }

 private:
  std::vector<int64_t> perm_;
};

// Blocks of channels to squares of pixels: (N, C, H, W) -> (N, C / b², H * b, W * b).
class DepthToSpace : public Kernel {
 public:
  explicit DepthToSpace(const OrtKernelInfo* info)
      : block_(Attributes(info).required_integer("blocksize")),
        channels_first_(Attributes(info).text("mode", "DCR") == "CRD") {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const int64_t n = x.shape.at(0), c = x.shape.at(1), h = x.shape.at(2), w = x.shape.at(3);
    const int64_t b = block_, channels = c / (b * b);
    require(block_ > 0 && c % (b * b) == 0, "DepthToSpace: the channels are not a multiple of the squared block");
    void* y = context.output(0, {n, channels, h * b, w * b});
    const int64_t plane = h * w, channel = plane * (channels_first_ ? b * b : 1),
                  row = channels_first_ ? b : channels * b;
    const int64_t column = channels_first_ ? 1 : channels;
    const std::vector<int64_t> sizes = {n, channels, h, b, w, b};
    const std::vector<int64_t> from = {c * plane, channel, w, row * plane, 1, column * plane};
    copy_strided(x, sizes, 0, from, y, 0, strides_of(sizes), context.stream());
  }

 private:
  int64_t block_;
  bool channels_first_;
};

class Concat : public Kernel {
 public:
  explicit Concat(const OrtKernelInfo* info) : axis_(Attributes(info).required_integer("axis")) {}
  void compute(KernelContext& context) const override {
    std::vector<int64_t> shape = context.input(0).shape;
    const int64_t axis = normalized_axis(axis_, shape.size());
    shape[axis] = 0;
    for (size_t i = 0; i < context.inputs(); ++i) shape[axis] += context.input(i).shape.at(axis);
    void* y = context.output(0, shape);
    std::vector<void*> parts;
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < context.inputs(); ++i) {
      const Tensor x = context.input(i);
      parts.push_back(const_cast<void*>(x.data));
      sizes.push_back(x.shape[axis]);
    }
    launch_concat(context.input(0), y, parts, sizes, shape, axis, false, context.stream());
  }

 private:
  int64_t axis_;
};

class Split : public Kernel {
 public:
  explicit Split(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 0)) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const int64_t axis = normalized_axis(axis_, x.shape.size());
    std::vector<int64_t> sizes = context.integers(1);
    const int64_t parts = static_cast<int64_t>(context.outputs());
    if (sizes.empty()) {
      const int64_t chunk = (x.shape[axis] + parts - 1) / parts;
      for (int64_t left = x.shape[axis]; static_cast<int64_t>(sizes.size()) < parts; left -= chunk) {
        sizes.push_back(std::max<int64_t>(0, std::min(chunk, left)));
      }
    }
    require(static_cast<int64_t>(sizes.size()) == parts &&
                std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == x.shape[axis],
            "Split: the sizes do not sum to the axis");
    std::vector<void*> outputs;
    for (size_t i = 0; i < context.outputs(); ++i) {
      std::vector<int64_t> shape = x.shape;
      shape[axis] = sizes[i];
      outputs.push_back(context.output(i, shape));
    }
    launch_concat(x, const_cast<void*>(x.data), outputs, sizes, x.shape, axis, true, context.stream());
  }

 private:
  int64_t axis_;
};

class Slice : public Kernel {
 public:
  explicit Slice(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    const std::vector<int64_t> starts = context.integers(1), ends = context.integers(2);
    std::vector<int64_t> axes = context.integers(3), steps = context.integers(4);
    std::vector<int64_t> shape = x.shape, strides = strides_of(x.shape);
    int64_t offset = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t axis = axes.empty() ? static_cast<int64_t>(i) : normalized_axis(axes[i], shape.size());
      const int64_t step = steps.empty() ? 1 : steps[i], size = x.shape[axis];
      require(step != 0, "Slice: a step is 0");
      const int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? size : size - 1;
      const auto bound = [&](int64_t at) { return std::min(std::max(at < 0 ? at + size : at, lowest), highest); };
      const int64_t start = bound(starts[i]), end = ends[i] < -size && step < 0 ? -1 : bound(ends[i]);
      const int64_t span = step > 0 ? end - start : start - end, length = std::abs(step);
      shape[axis] = span > 0 ? (span + length - 1) / length : 0;
      offset += start * strides[axis];
      strides[axis] *= step;
    }
    void* y = context.output(0, shape);
    copy_strided(x, shape, offset, strides, y, 0, strides_of(shape), context.stream());
  }
};

class Expand : public Kernel {
 public:
  explicit Expand(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0);
    std::vector<int64_t> shape = context.integers(1);
    if (shape.size() < x.shape.size()) shape.insert(shape.begin(), x.shape.size() - shape.size(), 1);
    std::vector<int64_t> from(shape.size(), 0);
    const std::vector<int64_t> strides = strides_of(x.shape);
    for (size_t i = 0; i < x.shape.size(); ++i) {
      const size_t target = shape.size() - x.shape.size() + i;
      require(shape[target] == 1 || x.shape[i] == 1 || shape[target] == x.shape[i],
              "Expand: the shapes do not broadcast");
      if (x.shape[i] != 1) from[target] = strides[i];
      if (shape[target] == 1) shape[target] = x.shape[i];
    }
    void* y = context.output(0, shape);
    copy_strided(x, shape, 0, from, y, 0, strides_of(shape), context.stream());
  }
};

class Gather : public Kernel {
 public:
  explicit Gather(const OrtKernelInfo* info) : axis_(Attributes(info).integer("axis", 0)) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), indices = context.input(1);
    const int64_t axis = normalized_axis(axis_, x.shape.size());
    GatherCall c{};
    std::vector<int64_t> shape(x.shape.begin(), x.shape.begin() + axis);
    c.outer = element_count(shape);
    shape.insert(shape.end(), indices.shape.begin(), indices.shape.end());
    const std::vector<int64_t> after(x.shape.begin() + axis + 1, x.shape.end());
    shape.insert(shape.end(), after.begin(), after.end());
    c.from = x.data;
    c.indices = indices.data;
    c.int64_indices = indices.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    c.size = x.shape[axis];
    c.count = indices.size();
    c.inner = element_count(after);
    c.to = context.output(0, shape);
    if (element_count(shape) > 0) check_launch(gather(c, context.stream()));
  }

 private:
  int64_t axis_;
};

class GatherNd : public Kernel {
 public:
  explicit GatherNd(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), indices = context.input(1);
    GatherNdCall c{};
    c.depth = static_cast<int>(indices.shape.back());
    require_axes(x.shape.size());
    require(c.depth <= static_cast<int>(x.shape.size()), "GatherND: the index tuples are longer than the rank");
    std::vector<int64_t> shape(indices.shape.begin(), indices.shape.end() - 1);
    c.count = element_count(shape);
    const std::vector<int64_t> strides = strides_of(x.shape);
    for (int axis = 0; axis < c.depth; ++axis) {
      c.sizes[axis] = x.shape[axis];
      c.strides[axis] = strides[axis];
    }
    shape.insert(shape.end(), x.shape.begin() + c.depth, x.shape.end());
    c.inner = c.count == 0 ? 0 : element_count(shape) / c.count;
    c.from = x.data;
    c.indices = static_cast<const int64_t*>(indices.data);
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    c.to = context.output(0, shape);
    if (element_count(shape) > 0) check_launch(gather_nd(c, context.stream()));
  }
};

class Pad : public Kernel {
 public:
  explicit Pad(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), value = context.input(2);
    const std::vector<int64_t> pads = context.integers(1), axes = context.integers(3);
    require_axes(x.shape.size());
    PadCall c{};
    std::vector<int64_t> shape = x.shape;
    const size_t count = pads.size() / 2;
    for (size_t i = 0; i < count; ++i) {
      const int64_t axis = axes.empty() ? static_cast<int64_t>(i) : normalized_axis(axes[i], shape.size());
      c.before[axis] = pads[i];
      shape[axis] += pads[i] + pads[count + i];
    }
    c.from = x.data;
    c.element_bytes = static_cast<int>(element_bytes(x.type));
    if (value) std::memcpy(&c.value, value.data, element_bytes(x.type));
    c.axes = static_cast<int>(shape.size());
    std::copy(x.shape.begin(), x.shape.end(), c.from_sizes);
    std::copy(shape.begin(), shape.end(), c.to_sizes);
    c.to = context.output(0, shape);
    if (element_count(shape) > 0) check_launch(pad(c, context.stream()));
  }
};

class Resize : public Kernel {
 public:
  explicit Resize(const OrtKernelInfo*) {}
  void compute(KernelContext& context) const override {
    const Tensor x = context.input(0), scales = context.input(2);
    std::vector<int64_t> shape = context.integers(3);
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
    c.to = context.output(0, shape);
    if (element_count(shape) > 0) check_launch(resize_nearest(c, context.stream()));
  }
};

// The attribute `value` is a tensor with one element, by default float32 0.
class ConstantOfShape : public Kernel {
 public:
  explicit ConstantOfShape(const OrtKernelInfo* info) {
    OrtAllocator* allocator = nullptr;
    check(ort_api->GetAllocatorWithDefaultOptions(&allocator));
    OrtHandle<OrtValue> value(ort_api->ReleaseValue);
    OrtStatus* status = ort_api->KernelInfoGetAttribute_tensor(info, "value", allocator, value.out());
    if (status != nullptr) {
      ort_api->ReleaseStatus(status);
      return;
    }
    OrtHandle<OrtTensorTypeAndShapeInfo> shape(ort_api->ReleaseTensorTypeAndShapeInfo);
    check(ort_api->GetTensorTypeAndShape(value.get(), shape.out()));
    ONNXTensorElementDataType type;
    check(ort_api->GetTensorElementType(shape.get(), &type));
    const void* data = nullptr;
    check(ort_api->GetTensorData(value.get(), &data));
    bytes_ = element_bytes(type);
    std::memcpy(&value_, data, bytes_);
  }
  void compute(KernelContext& context) const override {
    const std::vector<int64_t> shape = context.integers(0);
    void* y = context.output(0, shape);
    check_launch(fill(y, element_count(shape), &value_, static_cast<int>(bytes_), context.stream()));
  }

 private:
  uint64_t value_ = 0;
  size_t bytes_ = 4;
};

const char* unsupported_constant(const Node& node) {
  return element_bytes(node.outputs.at(0).type) == 0 ? "its type has no fixed size" : nullptr;
}
const char* unsupported_split(const Node& node) {
  if (node.since_version < 13) return "its sizes are an attribute (opset before 13)";
  return unsupported_elements(node);
}
const char* unsupported_slice(const Node& node) {
  if (node.since_version < 10) return "its bounds are attributes (opset before 10)";
  return unsupported_elements(node);
}
const char* unsupported_gather_nd(const Node& node) {
  if (node.integer("batch_dims", 0) != 0) return "its batch_dims is not 0";
  return unsupported_elements(node);
}
const char* unsupported_pad(const Node& node) {
  if (node.since_version < 11) return "its pads are an attribute (opset before 11)";
  if (node.text("mode", "constant") != "constant") return "its mode is not constant";
  return unsupported_elements(node);
}
const char* unsupported_resize(const Node& node) {
  if (node.since_version < 11) return "its scales are input 1 (opset before 11)";
  if (node.has("axes")) return "it has the attribute axes";
  if (node.integer("antialias", 0) != 0) return "it uses antialiasing";
  if (node.text("keep_aspect_ratio_policy", "stretch") != "stretch")
    return "its keep_aspect_ratio_policy is not stretch";
  const bool supported = node.text("mode", "nearest") == "nearest" &&
                         node.text("coordinate_transformation_mode", "half_pixel") == "asymmetric" &&
                         node.text("nearest_mode", "round_prefer_floor") == "floor";
  return supported ? unsupported_elements(node) : "its mode is not nearest with asymmetric coordinates and floor";
}

}  // namespace

void add_movement_kernels(KernelSpecs& specs) {
  specs.push_back({"", "Transpose", make_kernel<Transpose>, unsupported_elements});
  specs.push_back({"", "DepthToSpace", make_kernel<DepthToSpace>, unsupported_elements});
  specs.push_back({"", "Concat", make_kernel<Concat>, unsupported_elements});
  specs.push_back({"", "Split", make_kernel<Split>, unsupported_split, {1}});
  specs.push_back({"", "Slice", make_kernel<Slice>, unsupported_slice, {1, 2, 3, 4}});
  specs.push_back({"", "Expand", make_kernel<Expand>, unsupported_elements, {1}});
  specs.push_back({"", "Gather", make_kernel<Gather>, unsupported_elements});
  specs.push_back({"", "GatherND", make_kernel<GatherNd>, unsupported_gather_nd});
  specs.push_back({"", "Pad", make_kernel<Pad>, unsupported_pad, {1, 2, 3}});
  specs.push_back({"", "Resize", make_kernel<Resize>, unsupported_resize, {1, 2, 3}});
  specs.push_back({"", "ConstantOfShape", make_kernel<ConstantOfShape>, unsupported_constant, {0}});
}

}  // namespace sd_ort
