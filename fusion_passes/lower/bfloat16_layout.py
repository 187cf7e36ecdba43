"""Moves NHWC/NCHW Transposes into 1x1 convolutions of the CPU's tiles, which read and write NHWC as transformers do.

    Transpose(x; NHWC to NCHW) -> Bfloat16Conv(., weight; 1 x 1)  =>  Bfloat16Conv(x, weight; x_last)
    Bfloat16Conv(x, weight; 1 x 1) -> Transpose(.; NCHW to NHWC)  =>  Bfloat16Conv(x, weight; y_last)

The same for QuantizedConv, whose QuantizeLinear may be in between if nothing else reads it. Other filters and strides,
and outputs with other consumers, stay.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome

NAME = "bfloat16_layout"
TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]


def bfloat16_layout(model: ir.Model) -> PassOutcome:
    """Rewrite the convolutions of `model` in place; count the Transposes that are moved into them."""
    outcome = PassOutcome()
    for node in model.graph:
        if node.op_type not in ("Bfloat16Conv", "QuantizedConv") or (values.dims(node.inputs[1]) or [])[2:] != [1, 1]:
            continue
        if node.attributes.get_int("stride", 1) != 1:
            continue
        first = node if node.op_type == "Bfloat16Conv" else _quantizes_for(node)
        before = None if first is None or first.inputs[0] is None else first.inputs[0].producer()
        if _transposes(before, TO_NCHW):
            assert before is not None
            assert first is not None
            first.replace_input_with(0, before.inputs[0])
            if first is not node:
                first.outputs[0].shape = None if before.inputs[0] is None else before.inputs[0].shape
            node.attributes["x_last"] = ir.AttrInt64("x_last", 1)
            outcome.counts[NAME] += 1
        (result,) = node.outputs
        uses = result.uses()
        after = next(iter(uses)).node if len(uses) == 1 and not result.is_graph_output() else None
        if _transposes(after, TO_NHWC):
            assert after is not None
            (last,) = after.outputs
            if last.is_graph_output():
                continue
            result.shape = last.shape
            last.replace_all_uses_with(result)
            node.attributes["y_last"] = ir.AttrInt64("y_last", 1)
            outcome.counts[NAME] += 1
    common.RemoveUnusedNodesPass()(model)
    return outcome


def _quantizes_for(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear whose output only `node` consumes, or None."""
    producer = None if node.inputs[0] is None else node.inputs[0].producer()
    alone = producer is not None and producer.op_type == "QuantizeLinear" and len(producer.outputs[0].uses()) == 1
    return producer if alone else None


def _transposes(node: ir.Node | None, order: list[int]) -> bool:
    return node is not None and node.op_type == "Transpose" and list(node.attributes.get_ints("perm") or ()) == order


def _case(name: str, body: str, rewrites: int, transposes: int, edge: int = 1) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[N,H,W,32] rows, float[N,32,H,W] image) => (float[N,P,Q,R] y)
        <float[32,32,{edge},{edge}] w, float[32] b> {{ {body} }}"""
    return PassCase(name, graph, rewrites, {"Transpose": transposes}, None, {"N": 2, "H": 3, "W": 5})


_FIRST = "x = Transpose <perm = [0, 3, 1, 2]> (rows)  "
_CONV = "sd_ort.Bfloat16Conv <stride = 1, x_last = 0, y_last = 0>"
_LAST = "l = Transpose <perm = [0, 2, 3, 1]> (z)  y = Relu (l)"
CASES = [
    _case("before", f"{_FIRST} y = {_CONV} (x, w, b)", 1, 0),
    _case("behind", f"z = {_CONV} (image, w, b)  {_LAST}", 1, 0),
    _case("both", f"{_FIRST} z = {_CONV} (x, w)  {_LAST}", 2, 0),
    _case("another order", f"x = Transpose <perm = [0, 3, 2, 1]> (rows)  y = {_CONV} (x, w, b)", 0, 1),
    _case("read twice", f"z = {_CONV} (image, w)  l = Transpose <perm = [0, 2, 3, 1]> (z)  "
          "s = Relu (l)  k = Transpose <perm = [0, 3, 1, 2]> (s)  y = Add (z, k)", 0, 2),
    _case("3 x 3", f"{_FIRST} y = {_CONV} (x, w, b)", 0, 1, edge=3),
]  # fmt: skip

PASS = Pass(NAME, bfloat16_layout, CASES, rounds_to_bfloat16=True)
