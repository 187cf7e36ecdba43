"""QuickGelu: fuses CLIP's activation, and the SiLU of a SwiGLU.

    x * Sigmoid(x * alpha)       =>  QuickGelu(x; alpha)                 alpha a constant scalar, 1.702 in CLIP
    (x * Sigmoid(x)) * y         =>  QuickGelu(x; alpha = 1) * y         x and y [N,S,D]

Rejected: an alpha that is not a constant scalar; a SiLU of images, which the GroupNorm fusion handles. A Sigmoid of
another tensor does not match.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class QuickGelu(Rule):
    """x * Sigmoid(x * alpha) => QuickGelu"""

    def pattern(self, op: Any, x: Any, alpha: Any) -> Any:
        return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))

    def reject_reason(self, alpha: ir.Value, **_: Any) -> str | None:
        return None if values.scalar(alpha) is not None else "alpha is not a constant scalar"

    def rewrite(self, op: Any, x: ir.Value, alpha: ir.Value) -> Any:
        return op.QuickGelu(x, alpha=values.scalar(alpha), _domain=DOMAIN)


class QuickGeluSwapped(QuickGelu):
    """Sigmoid(x * alpha) * x => QuickGelu"""

    def pattern(self, op: Any, x: Any, alpha: Any) -> Any:
        return op.Mul(op.Sigmoid(op.Mul(x, alpha)), x)


class SwiGlu(Rule):
    """SiLU(x) * y => QuickGelu(x) * y"""

    def silu(self, op: Any, x: Any) -> Any:
        return OrValue([op.Mul(x, op.Sigmoid(x)), op.Mul(op.Sigmoid(x), x)])

    def pattern(self, op: Any, x: Any, y: Any) -> Any:
        return op.Mul(self.silu(op, x), y)

    def reject_reason(self, x: ir.Value, y: ir.Value) -> str | None:
        if values.rank(x) != 3 or values.rank(y) != 3:
            return "the gate with SiLU is not [N,S,D]"
        return None

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value) -> Any:
        return op.Mul(op.QuickGelu(x, alpha=1.0, _domain=DOMAIN), y)


class SwiGluSwapped(SwiGlu):
    """y * SiLU(x) => QuickGelu(x) * y"""

    def pattern(self, op: Any, x: Any, y: Any) -> Any:
        return op.Mul(y, self.silu(op, x))


RULES = (QuickGelu, QuickGeluSwapped, SwiGlu, SwiGluSwapped)


def _graph(body: str, outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x, float[N,8] z) => (float[N,8] y {outputs})
        <float alpha = {{1.702}}, float[8] many> {{ {body} }}"""


def _swiglu(body: str, shape: str = "N,S,8", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{shape}] x, float[{shape}] z) => (float[{shape}] y {outputs}) {{ {body} }}"""


_ONE = {"QuickGelu": 1, "Sigmoid": 0, "Mul": 1}
_TOKENS = {"N": 2, "S": 3, "H": 4, "W": 5}
_case, _rejected = case_makers(_TOKENS)
CASES = [
    _case("SwiGLU", _swiglu("s = Sigmoid (x)  g = Mul (x, s)  y = Mul (g, z)"), ops=_ONE),
    _case("SwiGLU swapped", _swiglu("s = Sigmoid (x)  g = Mul (s, x)  y = Mul (z, g)"), ops=_ONE),
    _rejected(
        "SwiGLU of images",
        _swiglu("s = Sigmoid (x)  g = Mul (x, s)  y = Mul (g, z)", "N,8,H,W"),
        rejection="not [N,S,D]",
    ),
    _rejected("SiLU without a gate", _swiglu("s = Sigmoid (x)  g = Mul (x, s)  y = Add (g, z)")),
    _rejected("GLU", _swiglu("s = Sigmoid (x)  g = Mul (z, s)  y = Mul (g, z)")),
    _rejected(
        "SiLU is an output", _swiglu("s = Sigmoid (x)  g = Mul (x, s)  y = Mul (g, z)", outputs=", float[N,S,8] g")
    ),
    _case(
        "CLIP",
        _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (x, s)"),
        ops={"QuickGelu": 1, "Mul": 0},
        sizes={"N": 3},
    ),
    _case(
        "swapped", _graph("a = Mul (alpha, x)  s = Sigmoid (a)  y = Mul (s, x)"), ops={"QuickGelu": 1}, sizes={"N": 3}
    ),
    _rejected(
        "alpha a channel",
        _graph("a = Mul (x, many)  s = Sigmoid (a)  y = Mul (x, s)"),
        rejection="alpha",
        sizes={"N": 3},
    ),
    _rejected("gate of another tensor", _graph("a = Mul (z, alpha)  s = Sigmoid (a)  y = Mul (x, s)"), sizes={"N": 3}),
    _rejected(
        "alpha that is an input",
        _graph("a = Mul (x, t)  s = Sigmoid (a)  y = Mul (x, s)").replace("] z)", "] z, float t)"),
        rejection="alpha",
        sizes={"N": 3},
    ),
    _rejected(
        "product of another tensor", _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (a, s)"), sizes={"N": 3}
    ),
    _rejected(
        "gate is an output",
        _graph("a = Mul (x, alpha)  s = Sigmoid (a)  y = Mul (x, s)", ", float[N,8] s"),
        sizes={"N": 3},
    ),
]

PASS = rule_pass("quick_gelu", RULES, CASES)
