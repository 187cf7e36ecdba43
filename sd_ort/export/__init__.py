"""Export: a checkpoint's models as ONNX graphs."""

DEFAULT_OPSET = 20
