"""The record of a fused operator: all that a pass, a target or the inference of shapes asks about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fusion_passes.shapes.facts import Facts, Shape

DOMAIN = "sd_ort"
CONTRIB = "com.microsoft"  # where ONNX Runtime's providers have kernels of the same names and signatures


def always(node: ir.Node) -> bool:
    """Yes: ONNX Runtime's CPU provider has a kernel, or the operator is never one of its own."""
    return True


def never(node: ir.Node) -> bool:
    """No: ONNX Runtime's CPU provider has no kernel for such a node."""
    return False


@dataclass(frozen=True)
class Operator:
    """A fused operator of domain `sd_ort`.

    shape(node, facts): the shapes of its outputs; the first input's is known. body(node): (form, body): its meaning in
    standard ONNX, of which nodes of other forms have other bodies. `images`: inputs that are 4-D images, channels last
    where the attribute channels_last is 1. `float32_inputs`: those that ONNX Runtime's GPU kernels want in float32 in
    half precision models too. `statistics`: outputs that are float32 whatever the input is. on_cpu(node): whether ONNX
    Runtime 1.31's CPU provider has a kernel for the node of this name in `CONTRIB`. `exact`: whether its results are
    some of its inputs' numbers, not rounded. `counted`: whether it has a row in the table of what was fused.
    inside(node): a standard node that makes what kernels may round to the node's type on the way to its output.
    """

    name: str
    shape: Callable[[ir.Node, Facts], Sequence[Shape | None] | None]
    body: Callable[[ir.Node], tuple[str, str]]
    attributes: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    float32_inputs: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    on_cpu: Callable[[ir.Node], bool] = always
    exact: bool = False
    counted: bool = True
    inside: Callable[[ir.Node], ir.Node] | None = None
