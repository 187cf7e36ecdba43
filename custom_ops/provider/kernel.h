// The provider's kernels as ONNX Runtime calls them, and the list of them. A kernel's host part is a small class:
// attributes are read when it is made, compute() reads shapes, allocates outputs and launches on the session's stream.
#pragma once

#include <memory>
#include <vector>

#include "provider/node.h"
#include "provider/ort.h"

namespace sd_ort {

// One run of one node.
class Call {
 public:
  explicit Call(OrtKernelContext* context);

  Tensor input(size_t index) const { return tensors_.input(index); }
  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_; }
  // The output's memory; null when it is not asked for, or has no elements.
  void* output(size_t index, const std::vector<int64_t>& shape) { return tensors_.output(index, shape); }
  // The numbers of an int32 or int64 input that lies on the host; none when it is absent.
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
  virtual void compute(Call& call) const = 0;
};

// Throws when a launch gave a message.
void launched(const char* error);

// An operator that the provider runs.
struct KernelSpec {
  const char* domain;
  const char* op_type;
  std::unique_ptr<Kernel> (*make)(const OrtKernelInfo* info);
  // Null, or why the provider leaves this node to others.
  const char* (*refuses)(const Node& node) = nullptr;
  std::vector<int> host_inputs = {};  // inputs that are read on the host: shapes, axes
  bool host_output = false;           // output 0 is written on the host
  bool in_place = false;              // output 0 is input 0 with another shape
  bool overwrites = false;            // output 0 may lie where input 0 does, when nobody else reads that
};

template <class K>
std::unique_ptr<Kernel> make_kernel(const OrtKernelInfo* info) {
  return std::make_unique<K>(info);
}

using KernelSpecs = std::vector<KernelSpec>;
void add_sd_ort_kernels(KernelSpecs& specs);       // sd_ort_kernels.cc
void add_product_kernels(KernelSpecs& specs);      // product_kernels.cc: MatMul, Gemm
void add_elementwise_kernels(KernelSpecs& specs);  // elementwise_kernels.cc
void add_movement_kernels(KernelSpecs& specs);     // movement_kernels.cc: what only moves elements
void add_shape_kernels(KernelSpecs& specs);        // shape_kernels.cc: what only changes shapes, and copies
void add_reduction_kernels(KernelSpecs& specs);    // reduction_kernels.cc

// All of them, made once.
const KernelSpecs& kernel_specs();
// The spec of a node's operator, or null.
const KernelSpec* find_spec(const Node& node);
// Null, or why the provider has no kernel for the node.
const char* refuses(const KernelSpec* spec, const Node& node);

// A registry that ONNX Runtime finds the kernels in. Released by the caller.
OrtKernelRegistry* create_registry();

int64_t count_of(const std::vector<int64_t>& shape);
// An axis counted from the end made one counted from the start.
int64_t axis_of(int64_t axis, size_t rank);
// The shape that all broadcast to.
std::vector<int64_t> broadcast_shape(const std::vector<std::vector<int64_t>>& shapes);
// Strides of a contiguous tensor in the axes of `whole`, 0 where it repeats.
void set_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& whole, int64_t* strides);

}  // namespace sd_ort
