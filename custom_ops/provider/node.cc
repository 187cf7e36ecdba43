#include "provider/node.h"

namespace sd_ort {
namespace {

NodeValue describe(const OrtValueInfo* info) {
  NodeValue value;
  if (info == nullptr) return value;
  value.exists = true;
  value.info = info;
  const char* name = nullptr;
  check(ort_api->GetValueInfoName(info, &name));
  value.name = name;
  check(ort_api->ValueInfo_IsConstantInitializer(info, &value.is_constant));
  const OrtTypeInfo* type = nullptr;
  check(ort_api->GetValueInfoTypeInfo(info, &type));
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  if (type != nullptr) check(ort_api->CastTypeInfoToTensorInfo(type, &tensor));
  if (tensor == nullptr) return value;
  check(ort_api->GetTensorElementType(tensor, &value.type));
  if (!ort_api->TensorTypeAndShape_HasShape(tensor)) return value;
  size_t rank = 0;
  check(ort_api->GetDimensionsCount(tensor, &rank));
  value.rank = static_cast<int>(rank);
  value.shape.resize(rank);
  check(ort_api->GetDimensions(tensor, value.shape.data(), rank));
  return value;
}

}  // namespace

Node::Node(const OrtNode* node) : node_(node) {
  const char* text = nullptr;
  check(ort_api->Node_GetDomain(node, &text));
  domain = std::string(text) == "ai.onnx" ? "" : text;
  check(ort_api->Node_GetOperatorType(node, &text));
  op_type = text;
  check(ort_api->Node_GetName(node, &text));
  name = text;
  check(ort_api->Node_GetSinceVersion(node, &since_version));
  size_t count = 0;
  check(ort_api->Node_GetNumInputs(node, &count));
  std::vector<const OrtValueInfo*> infos(count);
  check(ort_api->Node_GetInputs(node, infos.data(), count));
  for (const OrtValueInfo* info : infos) inputs.push_back(describe(info));
  check(ort_api->Node_GetNumOutputs(node, &count));
  infos.assign(count, nullptr);
  check(ort_api->Node_GetOutputs(node, infos.data(), count));
  for (const OrtValueInfo* info : infos) outputs.push_back(describe(info));
}

const NodeValue& Node::input(size_t index) const {
  static const NodeValue absent;
  return index < inputs.size() ? inputs[index] : absent;
}

bool Node::has(const char* name) const {
  const OrtOpAttr* attribute = nullptr;
  OrtStatus* status = ort_api->Node_GetAttributeByName(node_, name, &attribute);
  if (status != nullptr) ort_api->ReleaseStatus(status);
  return status == nullptr && attribute != nullptr;
}

int64_t Node::integer(const char* name, int64_t default_value) const {
  if (!has(name)) return default_value;
  const OrtOpAttr* attribute = nullptr;
  check(ort_api->Node_GetAttributeByName(node_, name, &attribute));
  int64_t value = 0;
  size_t bytes = 0;
  check(ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &bytes));
  return value;
}

float Node::real(const char* name, float default_value) const {
  if (!has(name)) return default_value;
  const OrtOpAttr* attribute = nullptr;
  check(ort_api->Node_GetAttributeByName(node_, name, &attribute));
  float value = 0;
  size_t bytes = 0;
  check(ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_FLOAT, &value, sizeof(value), &bytes));
  return value;
}

std::string Node::text(const char* name, const std::string& default_value) const {
  if (!has(name)) return default_value;
  const OrtOpAttr* attribute = nullptr;
  check(ort_api->Node_GetAttributeByName(node_, name, &attribute));
  size_t bytes = 0;
  OrtStatus* short_of = ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, nullptr, 0, &bytes);
  if (short_of != nullptr) ort_api->ReleaseStatus(short_of);
  std::string value(bytes, '\0');
  check(ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, value.data(), bytes, &bytes));
  return value.c_str();  // without the terminating zero
}

std::vector<int64_t> Node::integers(const char* name) const {
  if (!has(name)) return {};
  const OrtOpAttr* attribute = nullptr;
  check(ort_api->Node_GetAttributeByName(node_, name, &attribute));
  size_t bytes = 0;
  OrtStatus* short_of = ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, nullptr, 0, &bytes);
  if (short_of != nullptr) ort_api->ReleaseStatus(short_of);
  std::vector<int64_t> values(bytes / sizeof(int64_t));
  if (!values.empty()) check(ort_api->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, values.data(), bytes, &bytes));
  return values;
}

std::vector<int64_t> Node::constants(size_t index) const {
  const NodeValue& value = input(index);
  if (!value.is_constant || value.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) return {};
  const OrtValue* tensor = nullptr;
  check(ort_api->ValueInfo_GetInitializerValue(value.info, &tensor));
  OrtHandle<OrtTensorTypeAndShapeInfo> info(ort_api->ReleaseTensorTypeAndShapeInfo);
  check(ort_api->GetTensorTypeAndShape(tensor, info.out()));
  size_t count = 0;
  check(ort_api->GetTensorShapeElementCount(info.get(), &count));
  const void* data = nullptr;
  check(ort_api->GetTensorData(tensor, &data));
  const int64_t* numbers = static_cast<const int64_t*>(data);
  return {numbers, numbers + count};
}

std::vector<std::string> Node::outer_values() const {
  size_t count = 0;
  check(ort_api->Node_GetNumImplicitInputs(node_, &count));
  std::vector<const OrtValueInfo*> infos(count);
  if (count > 0) check(ort_api->Node_GetImplicitInputs(node_, infos.data(), count));
  std::vector<std::string> names;
  for (const OrtValueInfo* info : infos) names.push_back(describe(info).name);
  return names;
}

bool is_float(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ||
         type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
}

bool is_integer(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 ||
         type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
}

size_t element_bytes(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN:
      return 1;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
      return 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32:
      return 4;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace sd_ort
