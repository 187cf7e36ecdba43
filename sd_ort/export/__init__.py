"""Export of the models of a checkpoint to ONNX graphs."""

DEFAULT_OPSET = 20
