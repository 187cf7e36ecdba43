"""Model-local functions: the definitions of fused operators in standard ONNX.

A fused node of domain `sd_ort` runs on any ONNX runtime, because the model contains its function. If an op library with
a kernel of that name is registered, ONNX Runtime uses the kernel instead. Functions read the node's attributes, so one
function serves all nodes of an operator. If nodes differ in their inputs (with or without a mask) or attribute names,
the second variant becomes an overload. ONNX Runtime before 1.27 confuses overloads, so there are no needless ones.
Targets without a kernel inline the same functions (`lower/inline_fused_ops.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes.operators import BY_NAME
from fusion_passes.operators.definition import QUANTIZED_SCALE


def attach(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Add the functions of `nodes`, fused nodes of `model`, once per overload, and set the nodes' overloads."""
    version = model.graph.opset_imports.get("", 21)
    overloads: dict[str, dict[tuple[str, ...], str]] = {}
    for node in nodes:
        overload, body = BY_NAME[node.op_type].body(node)
        if QUANTIZED_SCALE in node.attributes:
            overload, body = "_".join(filter(None, (overload, "float8"))), _with_float8_output(body)
        variants = overloads.setdefault(node.op_type, {})
        name = overload or "plain"
        while name in variants.values():
            name += "_too"
        node.overload = variants.setdefault((overload, *sorted(node.attributes)), name if variants else "")
        key = (DOMAIN, node.op_type, node.overload)
        if key not in model.functions:
            model.functions[key] = _function(node, body, version)
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def _with_float8_output(body: str) -> str:
    """Return a function body with another output: the first one in float8, divided by the attribute of its scale."""
    head, outputs, statements = re.fullmatch(r"(.*?=>\s*)\(([^)]*)\)(.*)\}\s*", body, re.DOTALL).groups()  # type: ignore[union-attr]
    first = outputs.split(",")[0].strip()
    return f"""{head}({outputs}, quantized) {statements}
        divisor_number = Constant <value_float: float = @{QUANTIZED_SCALE}> ()
        divisor = CastLike (divisor_number, {first})
        quantized = QuantizeLinear <output_dtype = {int(ir.DataType.FLOAT8E4M3FN)}> ({first}, divisor)
    }}"""


def _function(node: ir.Node, body: str, version: int) -> ir.Function:
    attributes = f"<{', '.join(sorted(node.attributes))}>" if node.attributes else ""
    proto = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {version}]>\n{node.op_type} {attributes} {body}'
    )
    proto.overload = node.overload
    function = ir.from_proto(proto)
    assert isinstance(function, ir.Function)
    return function
