"""GroupNorm + SiLU: fuses the activation into the normalization.

    GroupNorm(activation=0) -> y;  y * Sigmoid(y)   =>  GroupNorm(activation=1)

Rejected: another consumer of y, a Sigmoid of another tensor, a GroupNorm that has an activation.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class GroupNormSilu(Rule):
    """GroupNorm -> SiLU => GroupNorm(activation=1)"""

    def pattern(self, op: Any, x: Any, gamma: Any, beta: Any) -> Any:
        y = op.GroupNorm(x, gamma, beta, _domain=DOMAIN, _outputs=["normal"])
        return op.Mul(y, op.Sigmoid(y))

    def reject_reason(self, normal: ir.Value, **_: Any) -> str | None:
        return "it has an activation already" if values.producer(normal).attributes["activation"].as_int() else None

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, beta: ir.Value, normal: ir.Value) -> Any:
        attributes = dict(values.producer(normal).attributes) | {"activation": 1}
        return op.GroupNorm(x, gamma, beta, _domain=DOMAIN, **attributes)


class GroupNormSiluSwapped(GroupNormSilu):
    """GroupNorm -> Sigmoid(y) * y => GroupNorm(activation=1)"""

    def pattern(self, op: Any, x: Any, gamma: Any, beta: Any) -> Any:
        y = op.GroupNorm(x, gamma, beta, _domain=DOMAIN, _outputs=["normal"])
        return op.Mul(op.Sigmoid(y), y)


RULES = (GroupNormSilu, GroupNormSiluSwapped)


def _graph(tail: str, outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x) => (float[N,8,H,W] y {outputs}) <float[8] w, float[8] b> {{
            n = GroupNormalization <num_groups = 2> (x, w, b)
            s = Sigmoid (n)
            {tail}
        }}"""


_SIZES = {"N": 2, "H": 3, "W": 5}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("SiLU", _graph("y = Mul (n, s)"), ops={"GroupNorm": 1, "Sigmoid": 0, "Mul": 0}),
    _case("operands swapped", _graph("y = Mul (s, n)"), ops={"GroupNorm": 1, "Sigmoid": 0}),
    _rejected("gate of another tensor", _graph("y = Mul (x, s)")),
    _case(
        "two activations",
        _graph("m = Mul (n, s)  t = Sigmoid (m)  y = Mul (m, t)"),
        ops={"GroupNorm": 1, "Sigmoid": 1},
        rejection="activation already",
    ),
    _rejected("gate is an output", _graph("y = Mul (n, s)", ", float[N,8,H,W] s")),
    _rejected("normalized value is read twice", _graph("m = Mul (n, s)  y = Add (m, n)")),
    _rejected("normalized value is an output", _graph("y = Mul (n, s)", ", float[N,8,H,W] n")),
]

PASS = rule_pass("group_norm", RULES, CASES)
