// A node of the graph that ONNX Runtime asks about, before it is anybody's.
#pragma once

#include <vector>

#include "provider/ort.h"

namespace sd_ort {

// An input or output of a node. `there` is false for an absent optional one.
struct NodeValue {
  bool there = false;
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  int rank = -1;               // -1: unknown
  std::vector<int64_t> shape;  // -1: an open size
  bool is_constant = false;    // an initializer that nobody overrides
  const OrtValueInfo* info = nullptr;
};

class Node {
 public:
  explicit Node(const OrtNode* node);

  const OrtNode* get() const { return node_; }
  std::string domain, op_type, name;
  int since_version = 0;
  std::vector<NodeValue> inputs, outputs;

  // The input, or one that is not there.
  const NodeValue& input(size_t index) const;
  int64_t integer(const char* name, int64_t absent) const;
  float real(const char* name, float absent) const;
  std::string text(const char* name, const std::string& absent) const;
  bool has(const char* name) const;
  std::vector<int64_t> integers(const char* name) const;  // none where it is absent
  // The numbers of an input that is constant, of int64; none of another.
  std::vector<int64_t> constants(size_t index) const;
  std::vector<std::string> outer_values() const;  // which the graphs inside the node read from around it

 private:
  const OrtNode* node_;
};

bool is_float(ONNXTensorElementDataType type);         // float32, float16 or bfloat16
bool is_integer(ONNXTensorElementDataType type);       // int32, int64 or bool: what shape arithmetic is in
size_t element_bytes(ONNXTensorElementDataType type);  // 0 for what has no fixed size or is smaller than a byte

}  // namespace sd_ort
