"""Operators of ONNX Runtime domain `sd_ort`: one folder an op, each with `cases` and `reference` in Python."""

# Folders with an operator, in the order of custom_ops/registry.cc.
OPERATORS = (
    "group_norm",
    "skip_group_norm",
    "bias_split_gelu",
    "bias_add",
    "skip_layer_norm",
    "multi_head_attention",
    "linear_add",
    "upsample_nearest",
)

# What the GPU library has, in the order of custom_ops/gpu_library.cc: softmax is used by others, and no operator of
# ONNX Runtime.
GPU_OPERATORS = (*OPERATORS, "softmax")

# Those with a kernel for CPUs alone.
CPU_OPERATORS = ("winograd_conv",)
