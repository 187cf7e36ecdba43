"""Model-local function bodies: what each fused operator means, in standard ONNX.

A fused node of domain `sd_ort` runs on any ONNX runtime because the model carries its body; where a library with a
kernel of the same name is registered, the kernel is taken instead. Bodies read the node's attributes, so one body
serves all nodes of an operator. Where inputs differ (a mask here, none there) or other attributes are given, the
second form becomes an overload of the function; ONNX Runtime before 1.27 takes overloads for one another, so they are
made only where they must be.
The same bodies take a fused operator apart again for a target that has no kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from fusion_passes.operators import BY_NAME
from fusion_passes.operators.record import DOMAIN


def attach(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Give the model the bodies of `nodes` (fused nodes of it), each form once, and the nodes their overloads."""
    version = model.graph.opset_imports.get("", 21)
    overloads: dict[str, dict[tuple[str, ...], str]] = {}
    for node in nodes:
        form, body = BY_NAME[node.op_type].body(node)
        mine = overloads.setdefault(node.op_type, {})
        name = form or "plain"
        while name in mine.values():
            name += "_too"
        node.overload = mine.setdefault((form, *sorted(node.attributes)), name if mine else "")
        key = (DOMAIN, node.op_type, node.overload)
        if key not in model.functions:
            model.functions[key] = _function(node, body, version)
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def _function(node: ir.Node, body: str, version: int) -> ir.Function:
    declared = f"<{', '.join(sorted(node.attributes))}>" if node.attributes else ""
    proto = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {version}]>\n{node.op_type} {declared} {body}'
    )
    proto.overload = node.overload
    function = ir.from_proto(proto)
    assert isinstance(function, ir.Function)
    return function
