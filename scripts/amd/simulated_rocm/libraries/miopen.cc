// Simulated libMIOpen.so.1: the 56 functions that onnxruntime-rocm 1.22.2 takes, over host memory. Built from the real
// header. Fused plans are refused, as MIOpen refuses those that it has no kernel for.
#include <miopen/miopen.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "library.h"

namespace {

using simulated::bytes_of;
using simulated::check_memory;
using simulated::DType;
using simulated::fail;
using simulated::load;
using simulated::store;

constexpr size_t kConvolutionWorkspace = size_t{1} << 20;  // bytes of each convolution
constexpr size_t kReductionWorkspace = 64;

struct Handle {
  hipStream_t stream = nullptr;
};

struct Tensor {
  DType dtype = DType::kFloat32;
  std::vector<int> sizes, strides;

  int64_t count() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>()); }
  // Where the element at `index` is; an axis of one element is broadcast.
  int64_t offset(const int64_t* index) const {
    int64_t sum = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) sum += sizes[axis] == 1 ? 0 : index[axis] * strides[axis];
    return sum;
  }
  size_t bytes() const {
    int64_t last = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) last += int64_t{sizes[axis] - 1} * strides[axis];
    return (last + 1) * bytes_of(dtype);
  }
  float at(const void* data, const int64_t* index) const { return load(data, dtype, offset(index)); }
  void check(const char* function, const char* name, const void* data) const {
    if (count() > 0) check_memory(function, name, data, bytes(), bytes_of(dtype));
  }
};

struct Convolution {
  std::vector<int> pads, strides, dilations;
  int groups = 1;
};
struct Reduction {
  miopenReduceTensorOp_t operation = MIOPEN_REDUCE_TENSOR_ADD;
  miopenReduceTensorIndices_t indices = MIOPEN_REDUCE_TENSOR_NO_INDICES;
};
struct Activation {
  miopenActivationMode_t mode = miopenActivationPASTHRU;
  double alpha = 0, beta = 0, gamma = 0;
};

Tensor& tensor_of(miopenTensorDescriptor_t tensor) { return *reinterpret_cast<Tensor*>(tensor); }
hipStream_t stream_of(miopenHandle_t handle) { return reinterpret_cast<Handle*>(handle)->stream; }

template <class Object, class Pointer>
miopenStatus_t create(Pointer* to) {
  *to = reinterpret_cast<Pointer>(new Object);
  return miopenStatusSuccess;
}
template <class Object, class Pointer>
miopenStatus_t destroy(Pointer object) {
  delete reinterpret_cast<Object*>(object);
  return miopenStatusSuccess;
}

miopenStatus_t submit(miopenHandle_t handle, const char* function, std::function<void()> work) {
  simulated_hip_count(function);
  const hipError_t error = simulated::submit(stream_of(handle), std::move(work));
  return error == hipSuccess ? miopenStatusSuccess : miopenStatusUnknownError;
}

constexpr std::pair<miopenDataType_t, DType> kDTypes[] = {
    {miopenHalf, DType::kFloat16}, {miopenFloat, DType::kFloat32},     {miopenInt32, DType::kInt32},
    {miopenInt8, DType::kInt8},    {miopenBFloat16, DType::kBFloat16}, {miopenDouble, DType::kFloat64}};

// Alpha and beta: doubles for tensors of doubles, else floats.
float scalar(const void* value, const Tensor& tensor) {
  return load(value, tensor.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, 0);
}

// Calls visit(index) for each index of an array of these sizes, the last axis first.
template <class Visit>
void for_each(const std::vector<int>& sizes, const Visit& visit) {
  std::vector<int64_t> index(sizes.size(), 0);
  const int64_t count = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
  for (int64_t i = 0; i < count; ++i) {
    visit(index.data());
    for (size_t axis = sizes.size(); axis-- > 0;) {
      if (++index[axis] < sizes[axis]) break;
      index[axis] = 0;
    }
  }
}

struct ConvolutionCall {
  Tensor x, filters, y;
  Convolution convolution;
  float alpha, beta;
  const void* x_data;
  const void* filter_data;
  void* y_data;

  // A product for each image and group: filters (K, C R S) by columns (C R S, P Q).
  void run() const {
    const int64_t groups = convolution.groups, channels = filters.sizes[1], count = filters.sizes[0] / groups;
    const int64_t height = filters.sizes[2], width = filters.sizes[3];
    const int64_t out_height = y.sizes[2], out_width = y.sizes[3], pixels = out_height * out_width;
    const int64_t in_height = x.sizes[2], in_width = x.sizes[3], inner = channels * height * width;
    const double operations = static_cast<double>(inner) * pixels;
    std::vector<float> weights, image, columns(inner * pixels), product(count * pixels);
    for (int64_t n = 0; n < x.sizes[0]; ++n) {
      for (int64_t group = 0; group < groups; ++group) {
        weights = part(filters, filter_data, group * count, count, 0, channels);
        image = part(x, x_data, n, 1, group * channels, channels);
        simulated::in_parallel(inner, operations, [&](int64_t begin, int64_t end) {
          for (int64_t p = begin; p < end; ++p) {
            const float* from = &image[p / (height * width) * in_height * in_width];
            const int64_t r = p / width % height, s = p % width;
            for (int64_t i = 0; i < pixels; ++i) {
              const int64_t row =
                  i / out_width * convolution.strides[0] - convolution.pads[0] + r * convolution.dilations[0];
              const int64_t column =
                  i % out_width * convolution.strides[1] - convolution.pads[1] + s * convolution.dilations[1];
              const bool is_inside = row >= 0 && row < in_height && column >= 0 && column < in_width;
              columns[p * pixels + i] = is_inside ? from[row * in_width + column] : 0.f;
            }
          }
        });
        simulated::multiply(weights.data(), columns.data(), product.data(), count, pixels, inner);
        simulated::in_parallel(count, static_cast<double>(count) * pixels, [&](int64_t begin, int64_t end) {
          for (int64_t k = begin; k < end; ++k) {
            const int64_t plane = n * y.strides[0] + (group * count + k) * y.strides[1];
            for (int64_t i = 0; i < pixels; ++i) {
              const int64_t to = plane + i / out_width * y.strides[2] + i % out_width * y.strides[3];
              float value = alpha * product[k * pixels + i];
              if (beta != 0) value += beta * load(y_data, y.dtype, to);
              store(y_data, y.dtype, to, value);
            }
          }
        });
      }
    }
  }

  // Ranges of the first two axes of a tensor, contiguous.
  static std::vector<float> part(const Tensor& tensor, const void* data, int64_t first, int64_t firsts, int64_t second,
                                 int64_t seconds) {
    const int64_t height = tensor.sizes[2], width = tensor.sizes[3];
    std::vector<float> values(firsts * seconds * height * width);
    const auto convert = [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        const int64_t from =
            (first + plane / seconds) * tensor.strides[0] + (second + plane % seconds) * tensor.strides[1];
        for (int64_t i = 0; i < height * width; ++i) {
          const int64_t place = from + i / width * tensor.strides[2] + i % width * tensor.strides[3];
          values[plane * height * width + i] = load(data, tensor.dtype, place);
        }
      }
    };
    simulated::in_parallel(firsts * seconds, static_cast<double>(values.size()), convert);
    return values;
  }
};

// Whether the sizes of a convolution's tensors fit each other.
bool is_valid(const ConvolutionCall& call) {
  const Convolution& convolution = call.convolution;
  if (call.x.sizes.size() != 4 || call.filters.sizes.size() != 4 || call.y.sizes.size() != 4) return false;
  if (convolution.pads.size() != 2 || call.x.sizes[0] != call.y.sizes[0]) return false;
  if (call.filters.sizes[1] * convolution.groups != call.x.sizes[1]) return false;
  if (call.filters.sizes[0] != call.y.sizes[1] || call.filters.sizes[0] % convolution.groups != 0) return false;
  for (int axis : {0, 1}) {
    const int reach = (call.filters.sizes[axis + 2] - 1) * convolution.dilations[axis] + 1;
    const int size = call.x.sizes[axis + 2] + 2 * convolution.pads[axis] - reach;
    if (size < 0 || size / convolution.strides[axis] + 1 != call.y.sizes[axis + 2]) return false;
  }
  return true;
}

// Mean and variance of each channel (spatial) or each element of an image (per activation).
struct Moments {
  std::vector<double> mean, variance;
  double count;  // numbers of each
};

// Number of the statistics that an element belongs to.
int64_t statistic_of(const Tensor& x, miopenBatchNormMode_t mode, const int64_t* index) {
  if (mode == miopenBNSpatial) return index[1];
  int64_t number = 0;
  for (size_t axis = 1; axis < x.sizes.size(); ++axis) number = number * x.sizes[axis] + index[axis];
  return number;
}

Moments moments_of(const Tensor& x, const void* data, miopenBatchNormMode_t mode) {
  const int64_t statistics = mode == miopenBNSpatial ? x.sizes[1] : x.count() / x.sizes[0];
  Moments moments{std::vector<double>(statistics), std::vector<double>(statistics),
                  static_cast<double>(x.count()) / statistics};
  for_each(x.sizes, [&](const int64_t* i) { moments.mean[statistic_of(x, mode, i)] += x.at(data, i); });
  for (double& mean : moments.mean) mean /= moments.count;
  for_each(x.sizes, [&](const int64_t* i) {
    const int64_t statistic = statistic_of(x, mode, i);
    const double difference = x.at(data, i) - moments.mean[statistic];
    moments.variance[statistic] += difference * difference;
  });
  for (double& variance : moments.variance) variance /= moments.count;
  return moments;
}

void normalize(const Tensor& x, const void* x_data, const Tensor& y, void* y_data, const Moments& moments,
               double epsilon, miopenBatchNormMode_t mode, DType dtype, const void* scale, const void* bias) {
  for_each(x.sizes, [&](const int64_t* i) {
    const int64_t statistic = statistic_of(x, mode, i);
    const double value = (x.at(x_data, i) - moments.mean[statistic]) / std::sqrt(moments.variance[statistic] + epsilon);
    store(y_data, y.dtype, y.offset(i),
          static_cast<float>(value) * load(scale, dtype, statistic) + load(bias, dtype, statistic));
  });
}

float activate(const Activation& activation, float x) {
  const auto alpha = static_cast<float>(activation.alpha), beta = static_cast<float>(activation.beta);
  switch (activation.mode) {
    case miopenActivationPASTHRU:
      return x;
    case miopenActivationLOGISTIC:
      return 1 / (1 + std::exp(-x));
    case miopenActivationTANH:
      return beta * std::tanh(alpha * x);
    case miopenActivationRELU:
      return std::max(x, 0.f);
    case miopenActivationSOFTRELU:
      return std::log1p(std::exp(x));
    case miopenActivationABS:
      return std::fabs(x);
    case miopenActivationCLIPPEDRELU:
      return std::min(alpha, std::max(x, 0.f));
    case miopenActivationLEAKYRELU:
      return x > 0 ? x : alpha * x;
    case miopenActivationELU:
      return x > 0 ? x : alpha * std::expm1(x);
    default:
      fail("miopenActivationForward: mode %d is not simulated", activation.mode);
  }
}

}  // namespace

SIMULATED_EXPORT const char* miopenGetErrorString(miopenStatus_t status) {
  return status == miopenStatusSuccess ? "miopenStatusSuccess" : "an error of the simulated MIOpen";
}
SIMULATED_EXPORT miopenStatus_t miopenCreate(miopenHandle_t* handle) { return create<Handle>(handle); }
SIMULATED_EXPORT miopenStatus_t miopenDestroy(miopenHandle_t handle) { return destroy<Handle>(handle); }
SIMULATED_EXPORT miopenStatus_t miopenSetStream(miopenHandle_t handle, miopenAcceleratorQueue_t stream) {
  reinterpret_cast<Handle*>(handle)->stream = stream;
  return miopenStatusSuccess;
}

SIMULATED_EXPORT miopenStatus_t miopenCreateTensorDescriptor(miopenTensorDescriptor_t* tensor) {
  return create<Tensor>(tensor);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyTensorDescriptor(miopenTensorDescriptor_t tensor) {
  return destroy<Tensor>(tensor);
}
SIMULATED_EXPORT miopenStatus_t miopenSetTensorDescriptor(miopenTensorDescriptor_t descriptor, miopenDataType_t type,
                                                          int axes, const int* sizes, const int* strides) {
  Tensor& tensor = tensor_of(descriptor);
  const auto* known =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& row) { return row.first == type; });
  if (known == std::end(kDTypes)) fail("miopenSetTensorDescriptor: type %d is not simulated", type);
  tensor.dtype = known->second;
  tensor.sizes.assign(sizes, sizes + axes);
  if (strides != nullptr) {
    tensor.strides.assign(strides, strides + axes);
  } else {
    tensor.strides.assign(axes, 1);
    for (int axis = axes - 2; axis >= 0; --axis) tensor.strides[axis] = tensor.strides[axis + 1] * sizes[axis + 1];
  }
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetTensorDescriptorSize(miopenTensorDescriptor_t tensor, int* axes) {
  *axes = static_cast<int>(tensor_of(tensor).sizes.size());
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetTensorDescriptor(miopenTensorDescriptor_t descriptor, miopenDataType_t* type,
                                                          int* sizes, int* strides) {
  const Tensor& tensor = tensor_of(descriptor);
  for (const auto& [theirs, ours] : kDTypes) {
    if (ours == tensor.dtype) *type = theirs;
  }
  std::copy(tensor.sizes.begin(), tensor.sizes.end(), sizes);
  std::copy(tensor.strides.begin(), tensor.strides.end(), strides);
  return miopenStatusSuccess;
}

SIMULATED_EXPORT miopenStatus_t miopenCreateConvolutionDescriptor(miopenConvolutionDescriptor_t* convolution) {
  return create<Convolution>(convolution);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyConvolutionDescriptor(miopenConvolutionDescriptor_t convolution) {
  return destroy<Convolution>(convolution);
}
SIMULATED_EXPORT miopenStatus_t miopenInitConvolutionNdDescriptor(miopenConvolutionDescriptor_t descriptor, int axes,
                                                                  const int* pads, const int* strides,
                                                                  const int* dilations, miopenConvolutionMode_t mode) {
  if (mode != miopenConvolution) fail("miopenInitConvolutionNdDescriptor: mode %d is not simulated", mode);
  auto& convolution = *reinterpret_cast<Convolution*>(descriptor);
  convolution.pads.assign(pads, pads + axes);
  convolution.strides.assign(strides, strides + axes);
  convolution.dilations.assign(dilations, dilations + axes);
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenSetConvolutionGroupCount(miopenConvolutionDescriptor_t convolution, int groups) {
  reinterpret_cast<Convolution*>(convolution)->groups = groups;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetConvolutionSpatialDim(miopenConvolutionDescriptor_t convolution, int* axes) {
  *axes = static_cast<int>(reinterpret_cast<Convolution*>(convolution)->pads.size());
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetConvolutionNdDescriptor(miopenConvolutionDescriptor_t descriptor, int,
                                                                 int* axes, int* pads, int* strides, int* dilations,
                                                                 miopenConvolutionMode_t* mode) {
  const auto& convolution = *reinterpret_cast<Convolution*>(descriptor);
  *axes = static_cast<int>(convolution.pads.size());
  std::copy(convolution.pads.begin(), convolution.pads.end(), pads);
  std::copy(convolution.strides.begin(), convolution.strides.end(), strides);
  std::copy(convolution.dilations.begin(), convolution.dilations.end(), dilations);
  *mode = miopenConvolution;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenConvolutionForwardGetWorkSpaceSize(miopenHandle_t, const miopenTensorDescriptor_t,
                                                                         const miopenTensorDescriptor_t,
                                                                         const miopenConvolutionDescriptor_t,
                                                                         const miopenTensorDescriptor_t,
                                                                         size_t* bytes) {
  *bytes = kConvolutionWorkspace;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenFindConvolutionForwardAlgorithm(
    miopenHandle_t handle, const miopenTensorDescriptor_t x, const void* x_data, const miopenTensorDescriptor_t filters,
    const void* filter_data, const miopenConvolutionDescriptor_t convolution, const miopenTensorDescriptor_t y,
    void* y_data, const int requested, int* count, miopenConvAlgoPerf_t* results, void* workspace,
    size_t workspace_bytes, bool) {
  // It runs the candidates: the buffers must be there.
  const float one = 1, zero = 0;
  const miopenStatus_t status =
      miopenConvolutionForward(handle, &one, x, x_data, filters, filter_data, convolution, miopenConvolutionFwdAlgoGEMM,
                               &zero, y, y_data, workspace, workspace_bytes);
  *count = status == miopenStatusSuccess && requested > 0 ? 1 : 0;
  if (*count == 1) {
    results[0].fwd_algo = miopenConvolutionFwdAlgoGEMM;
    results[0].time = 1;
    results[0].memory = kConvolutionWorkspace;
  }
  return status;
}
SIMULATED_EXPORT miopenStatus_t miopenConvolutionForward(
    miopenHandle_t handle, const void* alpha, const miopenTensorDescriptor_t x, const void* x_data,
    const miopenTensorDescriptor_t filters, const void* filter_data, const miopenConvolutionDescriptor_t convolution,
    miopenConvFwdAlgorithm_t algorithm, const void* beta, const miopenTensorDescriptor_t y, void* y_data,
    void* workspace, size_t workspace_bytes) {
  constexpr const char* kName = "miopenConvolutionForward";
  const Tensor& out = tensor_of(y);
  const ConvolutionCall call{tensor_of(x),
                             tensor_of(filters),
                             out,
                             *reinterpret_cast<Convolution*>(convolution),
                             scalar(alpha, out),
                             scalar(beta, out),
                             x_data,
                             filter_data,
                             y_data};
  if (!is_valid(call)) return miopenStatusBadParm;
  if (algorithm != miopenConvolutionFwdAlgoGEMM) fail("%s: algorithm %d was not found", kName, algorithm);
  if (workspace == nullptr || workspace_bytes < kConvolutionWorkspace) {
    fail("%s: the algorithm needs a workspace of %zu bytes, got %zu at %p", kName, kConvolutionWorkspace,
         workspace_bytes, workspace);
  }
  check_memory(kName, "the workspace", workspace, kConvolutionWorkspace, 4);
  call.x.check(kName, "x", x_data);
  call.filters.check(kName, "the filters", filter_data);
  call.y.check(kName, "y", y_data);
  return submit(handle, kName, [call, workspace] {
    std::memset(workspace, 0xA5, kConvolutionWorkspace);
    call.run();
  });
}
// y = alpha bias + beta y.
SIMULATED_EXPORT miopenStatus_t miopenConvolutionForwardBias(miopenHandle_t handle, const void* alpha,
                                                             const miopenTensorDescriptor_t bias, const void* bias_data,
                                                             const void* beta, const miopenTensorDescriptor_t y,
                                                             void* y_data) {
  constexpr const char* kName = "miopenConvolutionForwardBias";
  const Tensor b = tensor_of(bias), out = tensor_of(y);
  // MIOpen takes these two values alone, and adds the bias to y.
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) return miopenStatusNotImplemented;
  b.check(kName, "the bias", bias_data);
  out.check(kName, "y", y_data);
  return submit(handle, kName, [=] {
    for_each(out.sizes, [&](const int64_t* i) {
      store(y_data, out.dtype, out.offset(i), out.at(y_data, i) + b.at(bias_data, i));
    });
  });
}

// C = op(alpha1 A, alpha2 B) + beta C; axes of one element are broadcast.
SIMULATED_EXPORT miopenStatus_t miopenOpTensor(miopenHandle_t handle, miopenTensorOp_t operation, const void* alpha1,
                                               const miopenTensorDescriptor_t a, const void* a_data, const void* alpha2,
                                               const miopenTensorDescriptor_t b, const void* b_data, const void* beta,
                                               const miopenTensorDescriptor_t c, void* c_data) {
  constexpr const char* kName = "miopenOpTensor";
  const Tensor left = tensor_of(a), right = tensor_of(b), out = tensor_of(c);
  const float left_scale = scalar(alpha1, out), right_scale = scalar(alpha2, out), out_scale = scalar(beta, out);
  left.check(kName, "A", a_data);
  right.check(kName, "B", b_data);
  out.check(kName, "C", c_data);
  return submit(handle, kName, [=] {
    for_each(out.sizes, [&](const int64_t* i) {
      const float x = left_scale * left.at(a_data, i), y = right_scale * right.at(b_data, i);
      float value = operation == miopenTensorOpAdd   ? x + y
                    : operation == miopenTensorOpMul ? x * y
                    : operation == miopenTensorOpMin ? std::min(x, y)
                                                     : std::max(x, y);
      if (out_scale != 0) value += out_scale * out.at(c_data, i);
      store(c_data, out.dtype, out.offset(i), value);
    });
  });
}

SIMULATED_EXPORT miopenStatus_t miopenSoftmaxForward_V2(miopenHandle_t handle, const void* alpha,
                                                        const miopenTensorDescriptor_t x, const void* x_data,
                                                        const void* beta, const miopenTensorDescriptor_t y,
                                                        void* y_data, miopenSoftmaxAlgorithm_t algorithm,
                                                        miopenSoftmaxMode_t mode) {
  constexpr const char* kName = "miopenSoftmaxForward_V2";
  const Tensor in = tensor_of(x), out = tensor_of(y);
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) fail("%s: scales other than 1 and 0 are not simulated", kName);
  in.check(kName, "x", x_data);
  out.check(kName, "y", y_data);
  return submit(handle, kName, [=] {
    // Sums go over the channels of each pixel, or over all of an image.
    std::vector<int> outer = in.sizes, summed(in.sizes.size(), 1);
    for (size_t axis = 1; axis < in.sizes.size(); ++axis) {
      if (axis == 1 || mode == MIOPEN_SOFTMAX_MODE_INSTANCE) std::swap(outer[axis], summed[axis]);
    }
    for_each(outer, [&](const int64_t* base) {
      const auto visit = [&](const auto& visitor) {
        for_each(summed, [&](const int64_t* inner) {
          std::vector<int64_t> index(in.sizes.size());
          for (size_t axis = 0; axis < index.size(); ++axis) index[axis] = base[axis] + inner[axis];
          visitor(index.data());
        });
      };
      float largest = -std::numeric_limits<float>::infinity(), sum = 0;
      visit([&](const int64_t* i) { largest = std::max(largest, in.at(x_data, i)); });
      visit([&](const int64_t* i) { sum += std::exp(in.at(x_data, i) - largest); });
      visit([&](const int64_t* i) {
        const float value = in.at(x_data, i) - largest;
        store(y_data, out.dtype, out.offset(i),
              algorithm == MIOPEN_SOFTMAX_LOG ? value - std::log(sum) : std::exp(value) / sum);
      });
    });
  });
}

SIMULATED_EXPORT miopenStatus_t miopenCreateReduceTensorDescriptor(miopenReduceTensorDescriptor_t* reduction) {
  return create<Reduction>(reduction);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyReduceTensorDescriptor(miopenReduceTensorDescriptor_t reduction) {
  return destroy<Reduction>(reduction);
}
SIMULATED_EXPORT miopenStatus_t miopenSetReduceTensorDescriptor(miopenReduceTensorDescriptor_t reduction,
                                                                miopenReduceTensorOp_t operation, miopenDataType_t,
                                                                miopenNanPropagation_t,
                                                                miopenReduceTensorIndices_t indices,
                                                                miopenIndicesType_t) {
  *reinterpret_cast<Reduction*>(reduction) = {operation, indices};
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetReductionIndicesSize(miopenHandle_t, const miopenReduceTensorDescriptor_t,
                                                              const miopenTensorDescriptor_t,
                                                              const miopenTensorDescriptor_t c, size_t* bytes) {
  *bytes = tensor_of(c).count() * 4;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenGetReductionWorkspaceSize(miopenHandle_t, const miopenReduceTensorDescriptor_t,
                                                                const miopenTensorDescriptor_t,
                                                                const miopenTensorDescriptor_t, size_t* bytes) {
  *bytes = kReductionWorkspace;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenReduceTensor(miopenHandle_t handle,
                                                   const miopenReduceTensorDescriptor_t descriptor, void* indices,
                                                   size_t indices_bytes, void* workspace, size_t workspace_bytes,
                                                   const void* alpha, const miopenTensorDescriptor_t a,
                                                   const void* a_data, const void* beta,
                                                   const miopenTensorDescriptor_t c, void* c_data) {
  constexpr const char* kName = "miopenReduceTensor";
  const Tensor in = tensor_of(a), out = tensor_of(c);
  const Reduction reduction = *reinterpret_cast<Reduction*>(descriptor);
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) fail("%s: scales other than 1 and 0 are not simulated", kName);
  const auto operation = reduction.operation;
  const bool is_extreme = operation == MIOPEN_REDUCE_TENSOR_MIN || operation == MIOPEN_REDUCE_TENSOR_MAX ||
                          operation == MIOPEN_REDUCE_TENSOR_AMAX;
  const bool has_indices = is_extreme && reduction.indices == MIOPEN_REDUCE_TENSOR_FLATTENED_INDICES;
  if (has_indices) {
    if (indices_bytes < out.count() * sizeof(int32_t)) return miopenStatusBadParm;
    check_memory(kName, "the indices", indices, out.count() * sizeof(int32_t), 4);
  }
  if (workspace == nullptr || workspace_bytes < kReductionWorkspace) return miopenStatusBadParm;
  check_memory(kName, "the workspace", workspace, kReductionWorkspace, 4);
  in.check(kName, "A", a_data);
  out.check(kName, "C", c_data);
  return submit(handle, kName, [=] {
    const size_t size = out.bytes() / bytes_of(out.dtype);
    std::vector<double> sums(size, operation == MIOPEN_REDUCE_TENSOR_MUL ? 1 : 0);
    std::vector<int32_t> chosen(size, -1), seen(size, 0);
    for_each(in.sizes, [&](const int64_t* i) {
      const int64_t to = out.offset(i);
      const double value = in.at(a_data, i);
      double& sum = sums[to];
      const int32_t number = seen[to]++;
      switch (operation) {
        case MIOPEN_REDUCE_TENSOR_ADD:
        case MIOPEN_REDUCE_TENSOR_AVG:
          sum += value;
          break;
        case MIOPEN_REDUCE_TENSOR_MUL:
          sum *= value;
          break;
        case MIOPEN_REDUCE_TENSOR_NORM1:
          sum += std::fabs(value);
          break;
        case MIOPEN_REDUCE_TENSOR_NORM2:
          sum += value * value;
          break;
        default: {
          const double compared = operation == MIOPEN_REDUCE_TENSOR_AMAX ? std::fabs(value) : value;
          if (number == 0 || (operation == MIOPEN_REDUCE_TENSOR_MIN ? compared < sum : compared > sum)) {
            sum = compared;
            chosen[to] = number;
          }
        }
      }
    });
    int64_t place = 0;
    for_each(out.sizes, [&](const int64_t* i) {
      const int64_t to = out.offset(i);
      double value = sums[to];
      if (operation == MIOPEN_REDUCE_TENSOR_AVG) value /= seen[to];
      if (operation == MIOPEN_REDUCE_TENSOR_NORM2) value = std::sqrt(value);
      store(c_data, out.dtype, to, static_cast<float>(value));
      if (has_indices) static_cast<int32_t*>(indices)[place++] = chosen[to];
    });
  });
}

SIMULATED_EXPORT miopenStatus_t miopenCreateActivationDescriptor(miopenActivationDescriptor_t* activation) {
  return create<Activation>(activation);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyActivationDescriptor(miopenActivationDescriptor_t activation) {
  return destroy<Activation>(activation);
}
SIMULATED_EXPORT miopenStatus_t miopenSetActivationDescriptor(const miopenActivationDescriptor_t activation,
                                                              miopenActivationMode_t mode, double alpha, double beta,
                                                              double gamma) {
  *reinterpret_cast<Activation*>(activation) = {mode, alpha, beta, gamma};
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenActivationForward(miopenHandle_t handle,
                                                        const miopenActivationDescriptor_t descriptor,
                                                        const void* alpha, const miopenTensorDescriptor_t x,
                                                        const void* x_data, const void* beta,
                                                        const miopenTensorDescriptor_t y, void* y_data) {
  constexpr const char* kName = "miopenActivationForward";
  const Tensor in = tensor_of(x), out = tensor_of(y);
  const Activation activation = *reinterpret_cast<Activation*>(descriptor);
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) fail("%s: scales other than 1 and 0 are not simulated", kName);
  in.check(kName, "x", x_data);
  out.check(kName, "y", y_data);
  return submit(handle, kName, [=] {
    for_each(in.sizes, [&](const int64_t* i) {
      store(y_data, out.dtype, out.offset(i), activate(activation, in.at(x_data, i)));
    });
  });
}

// Statistics of float16 and bfloat16 tensors are float32.
SIMULATED_EXPORT miopenStatus_t miopenDeriveBNTensorDescriptor(miopenTensorDescriptor_t derived,
                                                               const miopenTensorDescriptor_t x,
                                                               miopenBatchNormMode_t mode) {
  const Tensor& from = tensor_of(x);
  Tensor& to = tensor_of(derived);
  to.dtype = from.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  to.sizes = from.sizes;
  to.sizes[0] = 1;
  if (mode == miopenBNSpatial) std::fill(to.sizes.begin() + 2, to.sizes.end(), 1);
  to.strides.assign(to.sizes.size(), 1);
  for (int axis = static_cast<int>(to.sizes.size()) - 2; axis >= 0; --axis) {
    to.strides[axis] = to.strides[axis + 1] * to.sizes[axis + 1];
  }
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenBatchNormalizationForwardTraining(
    miopenHandle_t handle, miopenBatchNormMode_t mode, void* alpha, void* beta, const miopenTensorDescriptor_t x,
    const void* x_data, const miopenTensorDescriptor_t y, void* y_data, const miopenTensorDescriptor_t statistics,
    void* scale, void* bias, double factor, void* running_mean, void* running_variance, double epsilon,
    void* saved_mean, void* saved_inverse) {
  constexpr const char* kName = "miopenBatchNormalizationForwardTraining";
  const Tensor in = tensor_of(x), out = tensor_of(y), each = tensor_of(statistics);
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) fail("%s: scales other than 1 and 0 are not simulated", kName);
  in.check(kName, "x", x_data);
  out.check(kName, "y", y_data);
  for (void* data : {scale, bias}) each.check(kName, "scale or bias", data);
  for (void* data : {running_mean, running_variance, saved_mean, saved_inverse}) {
    if (data != nullptr) each.check(kName, "a statistic", data);
  }
  return submit(handle, kName, [=] {
    const Moments moments = moments_of(in, x_data, mode);
    normalize(in, x_data, out, y_data, moments, epsilon, mode, each.dtype, scale, bias);
    const double unbiased = moments.count > 1 ? moments.count / (moments.count - 1) : 1;
    for (size_t i = 0; i < moments.mean.size(); ++i) {
      const auto average = [&](void* data, double value) {
        if (data == nullptr) return;
        const double old = factor == 1 ? 0 : load(data, each.dtype, i) * (1 - factor);
        store(data, each.dtype, i, static_cast<float>(old + value * factor));
      };
      average(running_mean, moments.mean[i]);
      average(running_variance, moments.variance[i] * unbiased);
      if (saved_mean != nullptr) store(saved_mean, each.dtype, i, static_cast<float>(moments.mean[i]));
      if (saved_inverse != nullptr) {
        store(saved_inverse, each.dtype, i, static_cast<float>(1 / std::sqrt(moments.variance[i] + epsilon)));
      }
    }
  });
}
SIMULATED_EXPORT miopenStatus_t miopenBatchNormalizationForwardInference(
    miopenHandle_t handle, miopenBatchNormMode_t mode, void* alpha, void* beta, const miopenTensorDescriptor_t x,
    const void* x_data, const miopenTensorDescriptor_t y, void* y_data, const miopenTensorDescriptor_t statistics,
    void* scale, void* bias, void* mean, void* variance, double epsilon) {
  constexpr const char* kName = "miopenBatchNormalizationForwardInference";
  const Tensor in = tensor_of(x), out = tensor_of(y), each = tensor_of(statistics);
  if (scalar(alpha, out) != 1 || scalar(beta, out) != 0) fail("%s: scales other than 1 and 0 are not simulated", kName);
  in.check(kName, "x", x_data);
  out.check(kName, "y", y_data);
  for (void* data : {scale, bias, mean, variance}) each.check(kName, "a statistic", data);
  return submit(handle, kName, [=] {
    Moments moments;
    for (int64_t i = 0; i < each.count(); ++i) {
      moments.mean.push_back(load(mean, each.dtype, i));
      moments.variance.push_back(load(variance, each.dtype, i));
    }
    normalize(in, x_data, out, y_data, moments, epsilon, mode, each.dtype, scale, bias);
  });
}

SIMULATED_EXPORT miopenStatus_t miopenCreateFusionPlan(miopenFusionPlanDescriptor_t* plan,
                                                       const miopenFusionDirection_t, const miopenTensorDescriptor_t) {
  return create<int>(plan);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyFusionPlan(miopenFusionPlanDescriptor_t plan) {
  return destroy<int>(plan);
}
SIMULATED_EXPORT miopenStatus_t miopenCompileFusionPlan(miopenHandle_t, miopenFusionPlanDescriptor_t) {
  return miopenStatusUnsupportedOp;
}
SIMULATED_EXPORT miopenStatus_t miopenCreateOpConvForward(miopenFusionPlanDescriptor_t, miopenFusionOpDescriptor_t* op,
                                                          miopenConvolutionDescriptor_t,
                                                          const miopenTensorDescriptor_t) {
  *op = nullptr;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenCreateOpBiasForward(miopenFusionPlanDescriptor_t, miopenFusionOpDescriptor_t* op,
                                                          const miopenTensorDescriptor_t) {
  *op = nullptr;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenCreateOpActivationForward(miopenFusionPlanDescriptor_t,
                                                                miopenFusionOpDescriptor_t* op,
                                                                miopenActivationMode_t) {
  *op = nullptr;
  return miopenStatusSuccess;
}
SIMULATED_EXPORT miopenStatus_t miopenCreateOperatorArgs(miopenOperatorArgs_t* arguments) {
  return create<int>(arguments);
}
SIMULATED_EXPORT miopenStatus_t miopenDestroyOperatorArgs(miopenOperatorArgs_t arguments) {
  return destroy<int>(arguments);
}

NOT_SIMULATED(miopenConvolutionBackwardData)
NOT_SIMULATED(miopenCreateLRNDescriptor)
NOT_SIMULATED(miopenCreatePoolingDescriptor)
NOT_SIMULATED(miopenDestroyLRNDescriptor)
NOT_SIMULATED(miopenDestroyPoolingDescriptor)
NOT_SIMULATED(miopenExecuteFusionPlan)
NOT_SIMULATED(miopenFindConvolutionBackwardDataAlgorithm)
NOT_SIMULATED(miopenLRNForward)
NOT_SIMULATED(miopenPoolingForward)
NOT_SIMULATED(miopenSetLRNDescriptor)
NOT_SIMULATED(miopenSetNdPoolingDescriptor)
NOT_SIMULATED(miopenSetOpArgsActivForward)
NOT_SIMULATED(miopenSetOpArgsBiasForward)
NOT_SIMULATED(miopenSetOpArgsConvForward)
