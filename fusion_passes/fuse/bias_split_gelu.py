"""BiasSplitGelu: fuses the bias, Split, Gelu and Mul of a gated feed-forward layer.

    MatMul -> Add(bias[2D]) -> Split in two on the last axis -> left * Gelu(right)  =>  BiasSplitGelu(MatMul, bias)

Rejected: the gate on the left half, unequal halves, another axis, the tanh approximation of Gelu, a bias without one
element per channel.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class BiasSplitGelu(Rule):
    """Add -> Split -> left * Gelu(right) => BiasSplitGelu"""

    def product(self, op: Any, left: Any, right: Any) -> Any:
        return op.Mul(left, op.Gelu(right, _outputs=["gelu"]))

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        left, right = op.Split(op.Add(x, bias), _allow_other_inputs=True, _outputs=["left", "right"])
        return self.product(op, left, right)

    def reject_reason(self, x: ir.Value, bias: ir.Value, left: ir.Value, right: ir.Value, gelu: ir.Value) -> str | None:
        width, split, activation = values.size(x, -1), values.producer(left), values.producer(gelu)
        if not values.is_vector(bias, width):
            return "the bias is not a constant vector over the last axis"
        if values.rank(x) != 3 or not values.last_axis(split.attributes.get_int("axis", 0), x):
            return "the Split is not over the last axis of [N,S,2D]"
        halves = [values.size(left, -1), values.size(right, -1)]
        if len(split.outputs) != 2 or halves[0] is None or halves[0] != halves[1]:
            return "the Split is not into two halves of equal width"
        if activation.attributes.get_string("approximate", "none") != "none":
            return "the Gelu is the tanh approximation"
        return None

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasSplitGelu(x, bias, _domain=DOMAIN)


class BiasSplitGeluSwapped(BiasSplitGelu):
    """Add -> Split -> Gelu(right) * left => BiasSplitGelu"""

    def product(self, op: Any, left: Any, right: Any) -> Any:
        return op.Mul(op.Gelu(right, _outputs=["gelu"]), left)


RULES = (BiasSplitGelu, BiasSplitGeluSwapped)


def _graph(
    body: str = "g2 = Gelu (r)  y = Mul (l, g2)",
    axis: int = 2,
    halves: str = "4, 4",
    bias: str = "8",
    out: str = "N,S,4",
) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,8] x) => (float[{out}] y) <float[{bias}] b, int64[2] halves = {{{halves}}}> {{
            a = Add (b, x)
            l, r = Split <axis = {axis}> (a, halves)
            {body}
        }}"""


_SIZES = {"N": 2, "S": 6}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("GEGLU", _graph(), ops={"BiasSplitGelu": 1, "Split": 0, "Gelu": 0, "Add": 0}),
    _case("operands swapped", _graph("g2 = Gelu (r)  y = Mul (g2, l)", axis=-1), ops={"BiasSplitGelu": 1}),
    _rejected("gate on the left", _graph("g2 = Gelu (l)  y = Mul (r, g2)")),
    _rejected("tanh approximation", _graph('g2 = Gelu <approximate = "tanh"> (r)  y = Mul (l, g2)'), rejection="tanh"),
    _rejected("another axis", _graph(axis=1, halves="3, 3", out="N,3,8"), rejection="last axis"),
    _rejected("gate is an output", _graph().replace("] y)", "] y, float[N,S,4] g2)")),
    _rejected("left half is read twice", _graph("g2 = Gelu (r)  m = Mul (l, g2)  y = Add (m, l)")),
    _rejected(
        "biased value is read twice", _graph("g2 = Gelu (r)  m = Mul (l, g2)  t = ReduceMean (a)  y = Add (m, t)")
    ),
    _rejected(
        "unequal halves", _graph("g2 = Gelu (r)  y = Mul (l, g2)", halves="1, 7", out="N,S,7"), rejection="equal width"
    ),
    _rejected(
        "three parts",
        _graph(halves="3, 3, 2", out="N,S,3").replace("l, r =", "l, r, o =").replace("int64[2]", "int64[3]"),
        rejection="two halves of equal width",
    ),
    _rejected("Silu in place of Gelu", _graph("g1 = Sigmoid (r)  g2 = Mul (r, g1)  y = Mul (l, g2)")),
    _rejected("one bias for all", _graph(bias="1"), rejection="bias"),
]

PASS = rule_pass("bias_split_gelu", RULES, CASES)
