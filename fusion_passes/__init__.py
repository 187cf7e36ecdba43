"""Fusions that turn exporters' subgraphs into the fused operators of ONNX Runtime."""
