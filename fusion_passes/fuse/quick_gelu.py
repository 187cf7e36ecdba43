"""QuickGelu: CLIP's activation becomes one node.

    x * Sigmoid(x * alpha)   =>  QuickGelu(x; alpha)      alpha a constant number, 1.702 in CLIP

Refused: an alpha that is no constant number; a gate of another tensor is no match.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case
from fusion_passes.rule import Rule, rule_pass


class QuickGelu(Rule):
    """x * Sigmoid(x * alpha) => QuickGelu"""

    def pattern(self, op: Any, x: Any, alpha: Any) -> Any:
        return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))

    def refuse(self, alpha: ir.Value, **_: Any) -> str | None:
        return None if c.scalar(alpha) is not None else "alpha is not one constant number"

    def rewrite(self, op: Any, x: ir.Value, alpha: ir.Value) -> Any:
        return op.QuickGelu(x, alpha=c.scalar(alpha), _domain=DOMAIN)


class QuickGeluSwapped(QuickGelu):
    """Sigmoid(x * alpha) * x => QuickGelu"""

    def pattern(self, op: Any, x: Any, alpha: Any) -> Any:
        return op.Mul(op.Sigmoid(op.Mul(x, alpha)), x)


RULES = (QuickGelu, QuickGeluSwapped)


def _graph(body: str, outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x, float[N,8] z) => (float[N,8] y {outputs})
        <float alpha = {{1.702}}, float[8] many> {{ {body} }}"""


CASES = [
    Case(
        "CLIP",
        _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (x, s)"),
        ops={"QuickGelu": 1, "Mul": 0},
        sizes={"N": 3},
    ),
    Case(
        "swapped", _graph("a = Mul (alpha, x)  s = Sigmoid (a)  y = Mul (s, x)"), ops={"QuickGelu": 1}, sizes={"N": 3}
    ),
    Case(
        "alpha a channel",
        _graph("a = Mul (x, many)  s = Sigmoid (a)  y = Mul (x, s)"),
        fires=0,
        refused="alpha",
        sizes={"N": 3},
    ),
    Case(
        "gate of another tensor", _graph("a = Mul (z, alpha)  s = Sigmoid (a)  y = Mul (x, s)"), fires=0, sizes={"N": 3}
    ),
    Case(
        "alpha that is an input",
        _graph("a = Mul (x, t)  s = Sigmoid (a)  y = Mul (x, s)").replace("] z)", "] z, float t)"),
        fires=0,
        refused="alpha",
        sizes={"N": 3},
    ),
    Case(
        "product of another tensor",
        _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (a, s)"),
        fires=0,
        sizes={"N": 3},
    ),
    Case(
        "gate is an output",
        _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (x, s)", ", float[N,8] s"),
        fires=0,
        sizes={"N": 3},
    ),
]

PASS = rule_pass("quick_gelu", RULES, CASES)
