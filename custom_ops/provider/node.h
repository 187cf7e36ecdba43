// Read access to an OrtNode during node assignment.
#pragma once

#include <vector>

#include "provider/ort.h"

namespace sd_ort {

// An input or output of a node. `exists` is false for an absent optional one.
struct NodeValue {
  bool exists = false;
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  int rank = -1;               // -1: unknown
  std::vector<int64_t> shape;  // -1: unknown
  bool is_constant = false;    // an initializer that no graph input overrides
  const OrtValueInfo* info = nullptr;
};

class Node {
 public:
  explicit Node(const OrtNode* node);

  const OrtNode* get() const { return node_; }
  std::string domain, op_type, name;
  int since_version = 0;
  std::vector<NodeValue> inputs, outputs;

  // Returns the input, or one with `exists` false.
  const NodeValue& input(size_t index) const;
  int64_t integer(const char* name, int64_t default_value) const;
  float real(const char* name, float default_value) const;
  std::string text(const char* name, const std::string& default_value) const;
  bool has(const char* name) const;
  std::vector<int64_t> integers(const char* name) const;  // empty if it is absent
  // Returns the values of a constant int64 input; empty for any other input.
  std::vector<int64_t> constants(size_t index) const;
  std::vector<std::string> outer_values() const;  // implicit inputs of its subgraphs

 private:
  const OrtNode* node_;
};

bool is_float(ONNXTensorElementDataType type);         // float32, float16 or bfloat16
bool is_integer(ONNXTensorElementDataType type);       // int32, int64 or bool, the types of shape arithmetic
size_t element_bytes(ONNXTensorElementDataType type);  // 0 for types without a fixed size and sub-byte types

}  // namespace sd_ort
