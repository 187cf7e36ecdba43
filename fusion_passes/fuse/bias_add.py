"""BiasAdd: fuses a projection's bias and a residual that no normalization follows.

    (x + bias) + skip  =>  BiasAdd(x, bias, skip)     x a MatMul's [B,S,C]

Rejected: a bias that is not a vector over the last axis, a skip of another shape.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class BiasAdd(Rule):
    """(x + bias) + skip => BiasAdd"""

    def pattern(self, op: Any, x: Any, bias: Any, skip: Any) -> Any:
        return op.Add(op.Add(x, bias), skip)

    def reject_reason(self, x: ir.Value, bias: ir.Value, skip: ir.Value) -> str | None:
        if values.rank(x) != 3 or not values.is_vector(bias, values.size(x, -1)):
            return "the bias is not a constant vector over the last axis of [B,S,C]"
        if values.is_constant(skip) or not values.same_shape(x, skip):
            return "the residual is not of the same shape"
        return None

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, skip: ir.Value) -> Any:
        return op.BiasAdd(x, bias, skip, _domain=DOMAIN)


class BiasAddSwapped(BiasAdd):
    """skip + (x + bias) => BiasAdd"""

    def pattern(self, op: Any, x: Any, bias: Any, skip: Any) -> Any:
        return op.Add(skip, op.Add(x, bias))


RULES = (BiasAdd, BiasAddSwapped)


def _graph(body: str, bias: str = "8", skip: str = "B,S,8", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x, float[{skip}] k) => (float[B,S,8] y {outputs}) <float[{bias}] b> {{ {body} }}"""


_SIZES = {"B": 2, "S": 6}
_ONE = {"BiasAdd": 1, "Add": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("projection", _graph("a = Add (x, b)  y = Add (a, k)"), ops=_ONE),
    _case("operands swapped", _graph("a = Add (b, x)  y = Add (k, a)"), ops=_ONE),
    _rejected("biased value is an output", _graph("a = Add (x, b)  y = Add (a, k)", outputs=", float[B,S,8] a")),
    _rejected("biased value is read twice", _graph("a = Add (x, b)  r = Relu (a)  s = Add (r, k)  y = Add (a, s)")),
    _rejected(
        "bias that is an input",
        _graph("a = Add (x, v)  y = Add (a, k)").replace("] k)", "] k, float[8] v)"),
        rejection="constant vector",
    ),
    _rejected("one bias for all", _graph("a = Add (x, b)  y = Add (a, k)", bias="1"), rejection="bias"),
    _rejected("residual of one batch", _graph("a = Add (x, b)  y = Add (a, k)", skip="1,S,8"), rejection="residual"),
    _rejected(
        "vector over an unknown axis",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,C] x, float[B,S,C] k) => (float[B,S,C] y) <float[1] b> { a = Add (x, b)  y = Add (a, k) }""",
        rejection="constant vector",
        sizes={"B": 2, "S": 6, "C": 4},
    ),
    _rejected("residual broadcast", _graph("a = Add (x, b)  y = Add (a, k)", skip="8"), rejection="residual"),
    _rejected("bias a position", _graph("a = Add (x, b)  y = Add (a, k)", bias="6,1"), rejection="bias"),
]

PASS = rule_pass("bias_add", RULES, CASES)
