"""Custom ONNX Runtime operators of domain `sd_ort`: one folder an op."""
