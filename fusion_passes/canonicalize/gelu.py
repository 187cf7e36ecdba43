"""Gelu: replaces the exact (erf) formula, which exporters write below opset 20, by one node, and the tanh formula.

    x/sqrt2 -> Erf -> +1 -> times x -> times 0.5   (any order of the two products; x*(1/sqrt2) too)  =>  Gelu(x)
    x*0.5 * (1 + Tanh(sqrt(2/pi) * (x + 0.044715 * Pow(x, 3))))                      =>  Gelu(x; approximate="tanh")

The two are different functions (largest difference 1e-3).
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class _Gelu(Rule):
    def reject_reason(
        self, divisor: ir.Value | None, factor: ir.Value | None, one: ir.Value, half: ir.Value, **_: Any
    ) -> str | None:
        by = values.scalar(divisor) if divisor is not None else 1 / (values.scalar(factor) or math.nan)
        if by is None or not math.isclose(by, math.sqrt(2), rel_tol=1e-3):
            return "Erf's argument is not x / sqrt(2)"
        if values.scalar(one) != 1.0 or values.scalar(half) != 0.5:
            return "the constants are not 1 and 0.5"
        return None

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Gelu(x)

    def cdf(self, op: Any, x: Any, divisor: Any, factor: Any, one: Any) -> Any:
        return op.Add(op.Erf(OrValue([op.Div(x, divisor), op.Mul(x, factor)])), one)


class HalfLast(_Gelu):
    """(x * (1 + erf)) * 0.5 => Gelu"""

    def pattern(self, op: Any, x: Any, divisor: Any, factor: Any, one: Any, half: Any) -> Any:
        cdf = self.cdf(op, x, divisor, factor, one)
        return op.Mul(OrValue([op.Mul(x, cdf), op.Mul(self.cdf(op, x, divisor, factor, one), x)]), half)


class HalfFirst(_Gelu):
    """(x * 0.5) * (1 + erf) => Gelu"""

    def pattern(self, op: Any, x: Any, divisor: Any, factor: Any, one: Any, half: Any) -> Any:
        return op.Mul(op.Mul(x, half), self.cdf(op, x, divisor, factor, one))


class HalfInside(_Gelu):
    """x * (0.5 * (1 + erf)) => Gelu"""

    def pattern(self, op: Any, x: Any, divisor: Any, factor: Any, one: Any, half: Any) -> Any:
        return op.Mul(x, op.Mul(self.cdf(op, x, divisor, factor, one), half))


class ByTanh(Rule):
    """(x * 0.5) * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) => Gelu by tanh"""

    def pattern(self, op: Any, x: Any, three: Any, cubic: Any, root: Any, one: Any, half: Any) -> Any:
        argument = op.Mul(op.Add(x, op.Mul(op.Pow(x, three), cubic)), root)
        return op.Mul(op.Mul(x, half), op.Add(op.Tanh(argument), one))

    def reject_reason(self, **bindings: ir.Value) -> str | None:
        expected = {"three": 3.0, "cubic": 0.044715, "root": math.sqrt(2 / math.pi), "one": 1.0, "half": 0.5}
        same = (math.isclose(values.scalar(bindings[k]) or math.nan, v, rel_tol=1e-5) for k, v in expected.items())
        return None if all(same) else "the constants are not those of Gelu by tanh"

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Gelu(x, approximate="tanh")


RULES = (HalfLast, HalfFirst, HalfInside, ByTanh)


def _graph(body: str, root: float = math.sqrt(2), half: float = 0.5) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,8] y) <float r = {{{root:.8f}}}, float one = {{1.0}}, float half = {{{half}}}> {{
            {body}
        }}"""


_LAST = "d = Div (x, r)  e = Erf (d)  a = Add (e, one)  m = Mul (x, a)  y = Mul (m, half)"
_CONSTANTS = "float c = {0.044715}, float q = {0.7978845608}, float three = {3.0}"
_TANH = """h = Mul (x, half)  p = Pow (x, three)  k = Mul (p, c)  s = Add (x, k)  m = Mul (s, q)  t = Tanh (m)
            a = Add (t, one)  y = Mul (h, a)"""
_SIZES = {"N": 3}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("half last", _graph(_LAST), ops={"Gelu": 1, "Erf": 0}),
    _case(
        "half first",
        _graph("d = Div (x, r)  e = Erf (d)  a = Add (one, e)  h = Mul (half, x)  y = Mul (h, a)"),
        ops={"Gelu": 1},
    ),
    _case(
        "half inside",
        _graph("d = Div (x, r)  e = Erf (d)  a = Add (e, one)  h = Mul (a, half)  y = Mul (x, h)"),
        ops={"Gelu": 1},
    ),
    _rejected("error function is an output", _graph(_LAST).replace("] y)", "] y, float[N,8] e)")),
    _rejected(
        "Erf of another tensor", _graph(_LAST.replace("Div (x, r)", "Div (z, r)")).replace("] x)", "] x, float[N,8] z)")
    ),
    _rejected("two in place of one", _graph(_LAST.replace("Add (e, one)", "Add (e, r)")), rejection="1 and 0.5"),
    _rejected("another divisor", _graph(_LAST, root=1.5), rejection="sqrt(2)"),
    _rejected("another factor", _graph(_LAST, half=0.25), rejection="0.5"),
    _case("GPT-2", _graph(_TANH).replace("float one", f"{_CONSTANTS}, float one"), ops={"Gelu": 1, "Tanh": 0}),
    *(
        _rejected(
            f"by tanh, {name} changed",
            _graph(_TANH).replace("float one", f"{_CONSTANTS.replace(old, new)}, float one"),
            rejection="not those of Gelu by tanh",
        )
        for name, old, new in (("root", "0.7978845608", "0.8"), ("factor", "0.044715", "0.05"), ("power", "3.0", "2.0"))
    ),
    _rejected(
        "tanh without a cube",
        _graph("d = Mul (x, r)  e = Tanh (d)  a = Add (e, one)  m = Mul (x, a)  y = Mul (m, half)"),
    ),
]

PASS = rule_pass("gelu", RULES, CASES)
