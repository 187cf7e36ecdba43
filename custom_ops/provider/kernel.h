// Kernels of the provider as ONNX Runtime calls them, and their list. The constructor of a kernel reads its attributes;
// compute() reads shapes, allocates outputs and launches on the session's stream.
#pragma once

#include <memory>
#include <vector>

#include "provider/node.h"
#include "provider/ort.h"

namespace sd_ort {

// Inputs, outputs and stream of one kernel invocation.
class KernelContext {
 public:
  explicit KernelContext(OrtKernelContext* context);

  Tensor input(size_t index) const { return tensors_.input(index); }
  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_; }
  // Allocates an output; returns null if it is not requested or has no elements.
  void* output(size_t index, const std::vector<int64_t>& shape) { return tensors_.output(index, shape); }
  // Returns the values of an int32 or int64 input in host memory; empty if it is absent.
  std::vector<int64_t> integers(size_t index) const;
  void* stream() const { return stream_; }
  OrtKernelContext* context() const { return context_; }
  Tensors& tensors() { return tensors_; }

 private:
  OrtKernelContext* context_;
  Tensors tensors_;
  void* stream_ = nullptr;
  size_t inputs_ = 0, outputs_ = 0;
};

class Kernel : public OrtKernelImpl {
 public:
  Kernel();
  virtual ~Kernel() = default;
  virtual void compute(KernelContext& context) const = 0;
};

// Throws if a launch returned an error.
void check_launch(const char* error);

// An operator of ONNX Runtime that the provider implements.
struct KernelSpec {
  const char* domain;
  const char* op_type;
  std::unique_ptr<Kernel> (*make)(const OrtKernelInfo* info);
  // Returns null, or the reason why the provider does not support this node.
  const char* (*unsupported_reason)(const Node& node) = nullptr;
  std::vector<int> host_inputs = {};  // inputs in host memory: shapes, axes
  bool host_output = false;           // output 0 is in host memory
  bool alias = false;                 // output 0 is the memory of input 0, with another shape
  bool mutable_alias = false;         // output 0 may reuse the memory of input 0 if input 0 has no other consumer
};

template <class K>
std::unique_ptr<Kernel> make_kernel(const OrtKernelInfo* info) {
  return std::make_unique<K>(info);
}

using KernelSpecs = std::vector<KernelSpec>;
void add_sd_ort_kernels(KernelSpecs& specs);       // sd_ort_kernels.cc
void add_gemm_kernels(KernelSpecs& specs);         // gemm_kernels.cc: MatMul, Gemm
void add_elementwise_kernels(KernelSpecs& specs);  // elementwise_kernels.cc
void add_movement_kernels(KernelSpecs& specs);     // movement_kernels.cc: operators that copy elements
void add_shape_kernels(KernelSpecs& specs);        // shape_kernels.cc: reshapes, Shape and Memcpy
void add_reduction_kernels(KernelSpecs& specs);    // reduction_kernels.cc

// Specs of all kernels, created once.
const KernelSpecs& kernel_specs();
// Returns the spec of a node's operator, or null.
const KernelSpec* find_spec(const Node& node);
// Returns null, or the reason why the provider has no kernel for the node.
const char* unsupported_reason(const KernelSpec* spec, const Node& node);

// Reasons for the dtype of the first input, or null: not a floating-point type; not a type of fixed size.
const char* unsupported_float(const Node& node);
const char* unsupported_elements(const Node& node);
// The first two inputs must be floating-point and of one type.
const char* unsupported_dtypes(const Node& node);

// Creates the registry of all kernels. The caller releases it.
OrtKernelRegistry* create_registry();

int64_t element_count(const std::vector<int64_t>& shape);
// Converts a negative axis to a non-negative one; throws if it is out of range.
int64_t normalized_axis(int64_t axis, size_t rank);
// Returns the shape that all shapes broadcast to.
std::vector<int64_t> broadcast_shape(const std::vector<std::vector<int64_t>>& shapes);
// Sets the strides of a contiguous tensor broadcast to `target`: 0 along repeated axes.
void set_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& target, int64_t* strides);

}  // namespace sd_ort
