"""Definition of a fused operator, for passes, targets and shape inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fusion_passes.shapes.shape_info import Shape, ShapeInfo

# Attribute of nodes with an output in float8: the number that it is divided by.
QUANTIZED_SCALE = "quantized_scale"


def always(node: ir.Node) -> bool:
    """Return True: ONNX Runtime's CPU provider has a kernel, or the operator is never moved to `CONTRIB`."""
    return True


def never(node: ir.Node) -> bool:
    """Return False: ONNX Runtime's CPU provider has no kernel for the operator."""
    return False


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator of domain `sd_ort`.

    Args:
        shape: shape(node, info) returns the output shapes; the shape of the first input is known.
        body: body(node) returns (overload, function body in standard ONNX); another overload has another body.
        attributes: names of the attributes.
        image_inputs: indices of the 4-D image inputs, NHWC if the attribute channels_last is 1.
        float32_inputs: indices of the inputs that ONNX Runtime's GPU kernels need in float32 in half precision models.
        float32_outputs: indices of the outputs that are float32 for any input dtype.
        has_cpu_kernel: has_cpu_kernel(node) returns whether ONNX Runtime 1.31's CPU provider has a kernel for the
            node of this name in `CONTRIB`.
        copies_elements: every output element is a copy of an input element, so nothing is rounded.
        in_summary: the operator has a row in the summary of fused nodes.
        internal_node: internal_node(node) returns a standard node whose output a kernel may round to the node's dtype
            before computing its own output.
        dtype_input: index of the input whose dtype the outputs have.
        float8_output: index of the output that has the first one in float8, after those of the body. A node with
            attribute `QUANTIZED_SCALE` has it (`lower/float8_output.py`).
    """

    name: str
    shape: Callable[[ir.Node, ShapeInfo], Sequence[Shape | None] | None]
    body: Callable[[ir.Node], tuple[str, str]]
    attributes: tuple[str, ...] = ()
    image_inputs: tuple[int, ...] = ()
    float32_inputs: tuple[int, ...] = ()
    float32_outputs: tuple[int, ...] = ()
    has_cpu_kernel: Callable[[ir.Node], bool] = always
    copies_elements: bool = False
    in_summary: bool = True
    internal_node: Callable[[ir.Node], ir.Node] | None = None
    dtype_input: int = 0
    float8_output: int | None = None
