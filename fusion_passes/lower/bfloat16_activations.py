"""Stores activations in bfloat16 if all consumers round them to it: half the memory, the same results.

    Bfloat16MatMul(; to = float) -> Bfloat16MatMul | Bfloat16Attention  =>  Bfloat16MatMul(; to = bfloat16) -> ...
    Bfloat16Attention -> Bfloat16MatMul                                 =>  the same, its inputs and output bfloat16

A Reshape may be in between. The query, key, value and output of an attention are all bfloat16 or all float32. Values
with other consumers and graph outputs stay in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.graph_pass import Pass, PassCase, PassOutcome

NAME = "bfloat16_activations"
BFLOAT16 = ir.DataType.BFLOAT16
MATMUL, ATTENTION = "Bfloat16MatMul", "Bfloat16Attention"


def bfloat16_activations(model: ir.Model) -> PassOutcome:
    """Change the dtypes in place; count the values that become bfloat16."""
    outcome = PassOutcome()
    narrow = {node.outputs[0] for node in model.graph if node.op_type in (MATMUL, ATTENTION, "Reshape")}
    narrow = {value for value in narrow if value.dtype == ir.DataType.FLOAT and not value.is_graph_output()}
    while wide := {value for value in narrow if not _can_compute(value, narrow) or not _is_rounded(value, narrow)}:
        narrow -= wide
    for node in model.graph:
        if node.outputs and node.outputs[0] in narrow:
            node.outputs[0].dtype = BFLOAT16
            if node.op_type == MATMUL:
                node.attributes["to"] = ir.AttrInt64("to", int(BFLOAT16))
            outcome.counts[NAME] += 1
    return outcome


def _can_compute(value: ir.Value, narrow: set[ir.Value]) -> bool:
    """Return whether the producer can output bfloat16: it is a MatMul, or all its data inputs are in `narrow`."""
    node = value.producer()
    assert node is not None
    return node.op_type == MATMUL or all(each in narrow for each in _data(node))


def _is_rounded(value: ir.Value, narrow: set[ir.Value]) -> bool:
    """Return whether all consumers of a value round it, directly or after a Reshape or attention in `narrow`."""
    for node, index in value.uses():
        if node.op_type == MATMUL and index == 0:
            continue
        if node.op_type not in (ATTENTION, "Reshape") or not all(
            each in narrow for each in (*_data(node), *node.outputs)
        ):
            return False
    return bool(value.uses())


def _data(node: ir.Node) -> list[ir.Value]:
    return [each for each in node.inputs[: 1 if node.op_type == "Reshape" else None] if each is not None]


def _case(name: str, body: str, rewrites: int, ops: dict[str, int]) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,32] x, float[B,L,32] e) => (float[B,S,32] y)
        <float[32,32] a, float[32,32] b, float[32,32] c> {{ {body} }}"""
    return PassCase(name, graph, rewrites, ops, None, {"B": 2, "S": 5, "L": 3})


def _matmul(out: str, x: str, weight: str) -> str:
    return f"{out} = sd_ort.Bfloat16MatMul <gated = 0, to = 1> ({x}, {weight})  "


_ATTENTION = "sd_ort.Bfloat16Attention <num_heads = 2, scale = 0.3>"
_PROJECTED = _matmul("q", "x", "a") + _matmul("k", "e", "b") + _matmul("v", "e", "c")
CASES = [
    _case("two products", _matmul("p", "x", "a") + _matmul("y", "p", "b"), 1, {MATMUL: 2}),
    _case("attention", f"{_PROJECTED} h = {_ATTENTION} (q, k, v)  " + _matmul("y", "h", "a"), 4, {ATTENTION: 1}),
    _case(
        "a value that is read twice", _matmul("p", "x", "a") + _matmul("z", "p", "b") + "y = Add (p, z)", 0, {MATMUL: 2}
    ),
    _case("the graph's output", f"{_PROJECTED} y = {_ATTENTION} (q, k, v)", 0, {ATTENTION: 1}),
    _case(
        "a query that is no product",
        _matmul("k", "e", "b") + _matmul("v", "e", "c") + f"h = {_ATTENTION} (x, k, v)  " + _matmul("y", "h", "a"),
        0,
        {ATTENTION: 1},
    ),
]

PASS = Pass(NAME, bfloat16_activations, CASES, rounds_to_bfloat16=True)
