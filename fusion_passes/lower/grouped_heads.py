"""Lowers grouped-query attention to attention with fewer heads of keys and values, which are not repeated in memory.

    MultiHeadAttention(q, repeated(k), repeated(v), -, -, mask?; num_heads)
        =>  MultiHeadAttention(q, k, v, -, -, mask?; num_heads, kv_num_heads)

for targets whose kernels read the keys of a group for each of its query heads. Rejected: packed inputs; biases; keys or
values that are not repeated, as groups of one head each, from the same number of heads. A repeated key that another
node reads stays, for that node alone.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.repeated_heads import kv_before_repetition, kv_head_count


def grouped_heads(model: ir.Model, attention: str = "MultiHeadAttention") -> PassOutcome:
    """Rewrite the nodes of the operator `attention` in place."""
    outcome = rewrite_nodes(model, "grouped_heads", attention, _reject_reason, _rewrite)
    if outcome.counts.total():
        remove_unused(model.graph)
    return outcome


def _reject_reason(node: ir.Node) -> str | None:
    if len(node.inputs) < 3 or None in node.inputs[:3]:
        return "its inputs are packed"
    if any(value is not None for value in node.inputs[3:5]):
        return "it has a bias"
    return None if kv_head_count(node, 2) else "key and value are not heads that are repeated for adjacent query heads"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    kv_heads = kv_head_count(node, 2)
    assert kv_heads is not None
    for index, value in enumerate(kv_before_repetition(graph, node, 2), 1):
        node.replace_input_with(index, value)
    node.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", kv_heads)


def _repeated(name: str, repeat: str = "Expand", axis: int = 3) -> str:
    """Statements that repeat the heads of `name` [B,L,2,2] as {name}r [B,L,8], the new axis at `axis`."""
    return f"""  {name}4 = Reshape ({name}, split)  {name}5 = Unsqueeze ({name}4, at{axis})
        {name}e = {repeat} ({name}5, by{axis})  {name}r = Reshape ({name}e, flat)"""


def _case(
    name: str,
    body: str = _repeated("k") + _repeated("v"),
    inputs: str = "q, kr, vr",
    rejection: str | None = None,
    ops: dict[str, int] | None = None,
    heads: int = 4,
    outputs: str = "",
    attention: str = "MultiHeadAttention",
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] q, float[B,L,4] k, float[B,L,4] v, float[B,1,S,L] m, float[B,L,2,2] heads, float[8] bias)
          => (float[B,S,8] y {outputs})
        <int64[4] split = {{0, 0, 2, 2}}, int64[3] flat = {{0, 0, 8}}, int64[1] at2 = {{2}}, int64[1] at3 = {{3}},
         int64[5] by2 = {{1, 1, 2, 1, 1}}, int64[5] by3 = {{1, 1, 1, 2, 1}}> {{
            {body}
            y = sd_ort.{attention} <num_heads = {heads}, scale = 0.45> ({inputs})
        }}"""
    nodes = {"Expand": 0, "Tile": 0, "Reshape": 0} if rejection is None else {"Expand": 2}
    return PassCase(name, graph, int(rejection is None), ops or nodes, rejection, {"B": 2, "S": 5, "L": 3})


_OTHERS = "not heads that are repeated"
CASES = [
    _case("two query heads for each key"),
    _case("a mask", inputs="q, kr, vr, , , m"),
    _case("repeated by Tile", _repeated("k", "Tile") + _repeated("v", "Tile")),
    _case("heads that another operator splits", _repeated("k") + _repeated("v").replace("v4 = Reshape (v, split)", "")
          .replace("v4", "heads"), ops={"Expand": 0, "Reshape": 1}),
    _case("a repeated key that is an output", outputs=", float[B,L,8] kr", ops={"Expand": 1}),
    _case("keys repeated as a whole", _repeated("k", axis=2) + _repeated("v", axis=2), rejection=_OTHERS),
    _case("values repeated as a whole", _repeated("k") + _repeated("v", axis=2), rejection=_OTHERS),
    _case("heads of 2 repeated, heads of 1 split", heads=8, rejection=_OTHERS),
    _case("values that are not repeated", _repeated("k") + "  vr = Concat <axis = 2> (v, v)", rejection=_OTHERS,
          ops={"Expand": 1}),
    _case("a changed key", _repeated("k") + _repeated("v") + "  kt = Tanh (kr)", "q, kt, vr", rejection=_OTHERS),
]  # fmt: skip
BFLOAT16_CASES = [
    _case("two query heads for each key", attention="Bfloat16Attention"),
    _case(
        "keys repeated as a whole",
        _repeated("k", axis=2) + _repeated("v", axis=2),
        rejection=_OTHERS,
        attention="Bfloat16Attention",
    ),
]

PASS = Pass("grouped_heads", grouped_heads, CASES)
# For Bfloat16Attention only: ONNX Runtime's MultiHeadAttention has as many heads of keys as of queries.
BFLOAT16_PASS = Pass("grouped_bfloat16_heads", partial(grouped_heads, attention="Bfloat16Attention"), BFLOAT16_CASES)
