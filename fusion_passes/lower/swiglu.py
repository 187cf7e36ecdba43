"""Lowers the gate of a SwiGLU to SwiGlu, which reads its operands once.

    left, right = Split(x; last axis) -> QuickGelu(left; alpha = 1) * right  =>  SwiGlu(x)
    QuickGelu(gate; alpha = 1) * up                                          =>  SwiGlu(gate, up)

for targets with that kernel. Rejected: another alpha, as CLIP's; operands of different or unknown shapes; a SiLU with
other consumers.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import replace_value
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection


def swiglu(model: ir.Model) -> PassOutcome:
    """Rewrite the products of `model` in place."""
    outcome = PassOutcome()
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for silu, up in permutations(node.inputs, 2):
            activation = None if silu is None else silu.producer()
            if silu is None or up is None or activation is None:
                continue
            if activation.op_type != "QuickGelu" or activation.domain != DOMAIN:
                continue
            if reason := _reject_reason(activation, silu, up):
                outcome.rejections.append(Rejection(node, reason))
            else:
                _rewrite(model.graph, node, activation, up)
                outcome.counts["swiglu"] += 1
                break
    return outcome


def _reject_reason(activation: ir.Node, silu: ir.Value, up: ir.Value) -> str | None:
    if activation.attributes.get_float("alpha", 1.0) != 1.0:
        return "its activation is not SiLU"
    if not values.same_shape(silu, up):
        return "gate and up differ in shape, or a shape is unknown"
    if len(list(silu.uses())) != 1 or silu.is_graph_output():
        return "the SiLU has other consumers"
    return None


def _halves(gate: ir.Value, up: ir.Value) -> ir.Node | None:
    """Return the Split of a last axis into `gate` and `up` alone, or None."""
    split = gate.producer()
    if split is None or split.op_type != "Split" or split.domain or list(split.outputs) != [gate, up]:
        return None
    if not values.last_axis(split.attributes.get_int("axis", 0), split.inputs[0]):
        return None
    alone = all(len(list(part.uses())) == 1 and not part.is_graph_output() for part in split.outputs)
    return split if alone and values.size(gate, -1) is not None else None


def _rewrite(graph: ir.Graph, node: ir.Node, activation: ir.Node, up: ir.Value) -> None:
    gate = activation.inputs[0]
    assert gate is not None
    split = _halves(gate, up)
    fused = ir.node("SwiGlu", [gate, up] if split is None else [split.inputs[0]], domain=DOMAIN)
    fused.metadata_props.update(node.metadata_props)
    replace_value(graph, node, fused, node.outputs[0])
    for old in (node, activation, *(() if split is None else (split,))):
        graph.remove(old, safe=True)


def _graph(body: str, outputs: str = "", up: str = "B,S,4") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] x, float[B,S,4] a, float[{up}] b) => (float[B,S,4] y {outputs}) {{ {body} }}"""


_SILU = "s = sd_ort.QuickGelu <alpha = 1.0>"
_HALVES = "l, r = Split <axis = 2, num_outputs = 2> (x)"
_case = partial(PassCase, sizes={"B": 2, "S": 6}, ops={"SwiGlu": 1, "QuickGelu": 0, "Mul": 0, "Split": 0})
_rejected = partial(PassCase, sizes={"B": 2, "S": 6}, rewrites=0, ops={"SwiGlu": 0, "QuickGelu": 1, "Mul": 1})
CASES = [
    _case("halves", _graph(f"{_HALVES}  {_SILU} (l)  y = Mul (s, r)")),
    _case("halves, operands swapped", _graph(f"{_HALVES.replace('2,', '-1,', 1)}  {_SILU} (l)  y = Mul (r, s)")),
    _case("two tensors", _graph(f"{_SILU} (a)  y = Mul (s, b)")),
    _case("the gate on the right half", _graph(f"{_HALVES}  {_SILU} (r)  y = Mul (s, l)"),
          ops={"SwiGlu": 1, "Split": 1}),
    _case(
        "a half is read again",
        _graph(f"{_HALVES}  {_SILU} (l)  m = Mul (s, r)  y = Sub (m, r)"), ops={"SwiGlu": 1, "Split": 1},
    ),
    _case(
        "halves of another axis",
        _graph(f"q = Concat <axis = 1> (a, b)  l, r = Split <axis = 1, num_outputs = 2> (q)"
               f"  {_SILU} (l)  y = Mul (s, r)"),
        ops={"SwiGlu": 1, "Split": 1},
    ),
    _rejected("CLIP's activation", _graph("s = sd_ort.QuickGelu <alpha = 1.702> (a)  y = Mul (s, b)"),
              rejection="SiLU"),
    _rejected("one factor a token", _graph(f"{_SILU} (a)  y = Mul (s, b)", up="B,S,1"), rejection="differ in shape"),
    _rejected("the SiLU is an output", _graph(f"{_SILU} (a)  y = Mul (s, b)", ", float[B,S,4] s"),
              rejection="consumers"),
    _rejected("the SiLU squared", _graph(f"{_SILU} (a)  y = Mul (s, s)"), rejection="consumers"),
]  # fmt: skip

PASS = Pass("swiglu", swiglu, CASES)
