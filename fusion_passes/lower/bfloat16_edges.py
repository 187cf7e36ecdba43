"""Values that all their readers round to bfloat16 are written in it: half the memory, the same numbers.

    Bfloat16MatMul(; to = float) -> Bfloat16MatMul | Bfloat16Attention  =>  Bfloat16MatMul(; to = bfloat16) -> ...
    Bfloat16Attention -> Bfloat16MatMul                                 =>  the same, its inputs and output bfloat16

A Reshape may stand between. An attention's query, key, value and output are of one type: all are bfloat16, or none.
Left alone: values that something else reads, and the outputs of the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.pass_ import Case, Outcome, Pass

NAME = "bfloat16_edges"
BFLOAT16 = ir.DataType.BFLOAT16
PRODUCT, ATTENTION = "Bfloat16MatMul", "Bfloat16Attention"


def bfloat16_edges(model: ir.Model) -> Outcome:
    """Change the types in place; counts the values that became bfloat16."""
    outcome = Outcome()
    narrow = {node.outputs[0] for node in model.graph if node.op_type in (PRODUCT, ATTENTION, "Reshape")}
    narrow = {value for value in narrow if value.dtype == ir.DataType.FLOAT and not value.is_graph_output()}
    while wide := {value for value in narrow if not _is_made(value, narrow) or not _is_rounded(value, narrow)}:
        narrow -= wide
    for node in model.graph:
        if node.outputs and node.outputs[0] in narrow:
            node.outputs[0].dtype = BFLOAT16
            if node.op_type == PRODUCT:
                node.attributes["to"] = ir.AttrInt64("to", int(BFLOAT16))
            outcome.counts[NAME] += 1
    return outcome


def _is_made(value: ir.Value, narrow: set[ir.Value]) -> bool:
    """Whether the node that makes a value can make it of inputs that are narrow, or need not be."""
    node = value.producer()
    assert node is not None
    return node.op_type == PRODUCT or all(each in narrow for each in _data(node))


def _is_rounded(value: ir.Value, narrow: set[ir.Value]) -> bool:
    """Whether all that read a value round it, or hand it on to such."""
    for node, index in value.uses():
        if node.op_type == PRODUCT and index == 0:
            continue
        if node.op_type not in (ATTENTION, "Reshape") or not all(
            each in narrow for each in (*_data(node), *node.outputs)
        ):
            return False
    return bool(value.uses())


def _data(node: ir.Node) -> list[ir.Value]:
    return [each for each in node.inputs[: 1 if node.op_type == "Reshape" else None] if each is not None]


def _case(name: str, body: str, values: int, ops: dict[str, int]) -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,32] x, float[B,L,32] e) => (float[B,S,32] y)
        <float[32,32] a, float[32,32] b, float[32,32] c> {{ {body} }}"""
    return Case(name, graph, values, ops, None, {"B": 2, "S": 5, "L": 3})


def _product(out: str, x: str, weight: str) -> str:
    return f"{out} = sd_ort.Bfloat16MatMul <gated = 0, to = 1> ({x}, {weight})  "


_ATTENTION = "sd_ort.Bfloat16Attention <num_heads = 2, scale = 0.3>"
_PROJECTED = _product("q", "x", "a") + _product("k", "e", "b") + _product("v", "e", "c")
CASES = [
    _case("two products", _product("p", "x", "a") + _product("y", "p", "b"), 1, {PRODUCT: 2}),
    _case("attention", f"{_PROJECTED} h = {_ATTENTION} (q, k, v)  " + _product("y", "h", "a"), 4, {ATTENTION: 1}),
    _case(
        "a value that is read twice",
        _product("p", "x", "a") + _product("z", "p", "b") + "y = Add (p, z)",
        0,
        {PRODUCT: 2},
    ),
    _case("the graph's output", f"{_PROJECTED} y = {_ATTENTION} (q, k, v)", 0, {ATTENTION: 1}),
    _case(
        "a query that is no product",
        _product("k", "e", "b") + _product("v", "e", "c") + f"h = {_ATTENTION} (x, k, v)  " + _product("y", "h", "a"),
        0,
        {ATTENTION: 1},
    ),
]

PASS = Pass(NAME, bfloat16_edges, CASES, rounds=True)
