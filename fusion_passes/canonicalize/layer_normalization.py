"""Layer normalization: the formula that exporters spell out below opset 17 becomes one node.

    d = x - mean(x);  d / sqrt(mean(d^2) + epsilon) * gamma + beta   =>  LayerNormalization(x, gamma, beta)

over the last axis; half precision graphs compute the middle between Casts to a wider type, as the operator does inside.
Refused: another axis or power, an epsilon, gamma or beta that is not constant or of another size.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case
from fusion_passes.rule import Rule, rule_pass


class FromFormula(Rule):
    """x - mean -> square -> mean -> + epsilon -> sqrt -> division -> affine"""

    def pattern(
        self, op: Any, x: Any, axes: Any, square_axes: Any, two: Any, epsilon: Any, gamma: Any, beta: Any
    ) -> Any:
        distance = self.widen(op, op.Sub(x, op.ReduceMean(x, axes, _outputs=["mean"])))
        variance = op.ReduceMean(op.Pow(distance, two), square_axes, _outputs=["variance"])
        normal = self.narrow(op, op.Div(distance, op.Sqrt(op.Add(variance, epsilon))))
        return op.Add(op.Mul(normal, gamma), beta, _outputs=["out"])

    def widen(self, op: Any, value: Any) -> Any:
        return value

    def narrow(self, op: Any, value: Any) -> Any:
        return value

    def refuse(
        self, x: ir.Value, axes: ir.Value, square_axes: ir.Value, two: ir.Value, epsilon: ir.Value, gamma: ir.Value,
        beta: ir.Value, mean: ir.Value, variance: ir.Value, out: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        for value, over in ((mean, axes), (variance, square_axes)):
            node, numbers = value.producer(), c.ints(over)
            assert node is not None
            if numbers is None or len(numbers) != 1 or not c.last_axis(numbers[0], x):
                return "the mean is not over the last axis"
            if not node.attributes.get_int("keepdims", 1):
                return "the mean drops its axis"
        if c.scalar(two) != 2.0:
            return "the distance is not squared"
        if c.scalar(epsilon) is None:
            return "epsilon is not one constant number"
        if not (c.is_vector(gamma, c.size(x, -1)) and c.is_vector(beta, c.size(x, -1))):
            return "gamma and beta are not constant vectors over the last axis"
        return None if x.dtype == out.dtype == gamma.dtype else "the type changes on the way"

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, beta: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        return op.LayerNormalization(x, gamma, beta, axis=-1, epsilon=c.scalar(epsilon))


class FromWideFormula(FromFormula):
    """The same between Casts from half precision to a wider type and back."""

    def widen(self, op: Any, value: Any) -> Any:
        return op.Cast(value, _outputs=["wide"])

    def narrow(self, op: Any, value: Any) -> Any:
        return op.Cast(value)

    def refuse(self, **bindings: Any) -> str | None:
        if bindings["wide"].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return "the Casts do not widen half precision"
        return super().refuse(**bindings)


RULES = (FromFormula, FromWideFormula)


def _graph(
    body: str = "", power: float = 2.0, axis: int = -1, outputs: str = "", gamma: str = "8", opset: int = 14
) -> str:
    body = body or "p = Pow (d, two)  v = ReduceMean <axes = [-1]> (p)  e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)"
    return f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g (float[B,S,8] x) => (float[B,S,8] y {outputs})
        <float two = {{{power}}}, float eps = {{0.001}}, float[{gamma}] w, float[8] b> {{
            m = ReduceMean <axes = [{axis}]> (x)
            d = Sub (x, m)
            {body}
            a = Mul (n, w)
            y = Add (b, a)
        }}"""


_SIZES = {"B": 2, "S": 8}
_ONE = {"LayerNormalization": 1, "ReduceMean": 0}
CASES = [
    Case("opset 14", _graph(), ops=_ONE, sizes=_SIZES),
    Case("opset 17", _graph(axis=2, opset=17), ops=_ONE, sizes=_SIZES),
    Case("cubed", _graph(power=4.0), fires=0, refused="not squared", sizes=_SIZES),
    Case("another axis", _graph(axis=1), fires=0, refused="last axis", sizes=_SIZES),
    Case("one gamma for all", _graph(gamma="1"), fires=0, refused="gamma and beta", sizes=_SIZES),
    Case("distance is an output", _graph(outputs=", float[B,S,8] d"), fires=0, sizes=_SIZES),
    Case(
        "root mean square of something else",
        _graph("p = Pow (x, two)  v = ReduceMean <axes = [-1]> (p)  e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)"),
        fires=0,
        sizes=_SIZES,
    ),
]

PASS = rule_pass("layer_normalization", RULES, CASES)
